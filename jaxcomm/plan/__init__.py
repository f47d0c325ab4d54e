"""Networks: what they look like, and how long exchanges take on them."""

from jaxcomm.plan import fabrics
from jaxcomm.plan.files import TOPOLOGIES, load
from jaxcomm.plan.messages import Coded, Votes
from jaxcomm.plan.simulate import Exchange, Model, Simulation
from jaxcomm.plan.topology import Link, Topology

__all__ = [
    "TOPOLOGIES",
    "Coded",
    "Exchange",
    "Link",
    "Model",
    "Simulation",
    "Topology",
    "Votes",
    "fabrics",
    "load",
]
