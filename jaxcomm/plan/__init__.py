"""Networks: what they look like, and how long exchanges take on them."""

from jaxcomm.plan.fabrics import FABRICS
from jaxcomm.plan.files import TOPOLOGIES, load
from jaxcomm.plan.simulate import Model, Simulation
from jaxcomm.plan.topology import Link, Topology

__all__ = ["FABRICS", "TOPOLOGIES", "Link", "Model", "Simulation", "Topology", "load"]
