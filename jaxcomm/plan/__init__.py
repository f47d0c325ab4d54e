"""Networks, how long exchanges take on them, and which method to use.

In reading order: a topology, a cluster with its costs, a workload, and the plan for both. The
module itself is callable too: `jaxcomm.plan(...)` is `jaxcomm.plan.plan(...)`, which type checkers
know.
"""

import importlib
import sys
import types
from typing import Any

from jaxcomm.plan import fabrics
from jaxcomm.plan.choosing import Plan, plan
from jaxcomm.plan.costs import Costs, defaults
from jaxcomm.plan.costs import read as read_costs
from jaxcomm.plan.families import Method, methods
from jaxcomm.plan.files import TOPOLOGIES, load
from jaxcomm.plan.loads import Workload, workload
from jaxcomm.plan.machines import Cluster, cluster, load_cluster
from jaxcomm.plan.messages import Coded, Votes
from jaxcomm.plan.predict import Prediction
from jaxcomm.plan.probing import probe
from jaxcomm.plan.programs import seconds_of
from jaxcomm.plan.simulate import Exchange, Model, Simulation
from jaxcomm.plan.timing import timed
from jaxcomm.plan.topology import Link, Topology
from jaxcomm.plan.using import use

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
    "timed",
    "use",
    "workload",
]


class _Planner(types.ModuleType):
    """A module that plans when it is called, so that the call is `jaxcomm.plan(...)`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Plan:
        return plan(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """By its name, as cloudpickle would for a plain module, so that functions may use it."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Planner
