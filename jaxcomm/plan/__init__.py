"""Networks: what they look like, and how long exchanges take on them."""

from jaxcomm.plan.files import TOPOLOGIES, load
from jaxcomm.plan.topology import Link, Topology

__all__ = ["TOPOLOGIES", "Link", "Topology", "load"]
