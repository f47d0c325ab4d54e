"""Networks, how long exchanges take on them, and which method to take.

In reading order: a topology, a cluster with its costs, a workload, and the plan for both.
"""

from jaxcomm.plan import fabrics
from jaxcomm.plan.choosing import Plan, plan
from jaxcomm.plan.cluster import Cluster, cluster, load_cluster
from jaxcomm.plan.costs import Costs, defaults
from jaxcomm.plan.costs import read as read_costs
from jaxcomm.plan.files import TOPOLOGIES, load
from jaxcomm.plan.messages import Coded, Votes
from jaxcomm.plan.methods import Method, methods
from jaxcomm.plan.predict import Prediction
from jaxcomm.plan.probing import probe
from jaxcomm.plan.programs import seconds_of
from jaxcomm.plan.simulate import Exchange, Model, Simulation
from jaxcomm.plan.topology import Link, Topology
from jaxcomm.plan.using import use
from jaxcomm.plan.workload import Workload, workload

__all__ = [
    "TOPOLOGIES",
    "Cluster",
    "Coded",
    "Costs",
    "Exchange",
    "Link",
    "Method",
    "Model",
    "Plan",
    "Prediction",
    "Simulation",
    "Topology",
    "Votes",
    "Workload",
    "cluster",
    "defaults",
    "fabrics",
    "load",
    "load_cluster",
    "methods",
    "plan",
    "probe",
    "read_costs",
    "seconds_of",
    "use",
    "workload",
]
