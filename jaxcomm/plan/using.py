"""What `algorithm=None` stands for with a plan: the algorithm that is predicted to be fastest."""

import functools

from jaxcomm._placing import note_choice
from jaxcomm.collectives import algorithms
from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.collectives.algorithms._default import choose_by
from jaxcomm.collectives.algorithms.hierarchical import Hierarchical
from jaxcomm.collectives.reductions import CodedMean, Majority, Reduction
from jaxcomm.plan import messages
from jaxcomm.plan.families import SCHEDULED, ending_of
from jaxcomm.plan.machines import Cluster
from jaxcomm.plan.order import best_dimensions

_GAIN = 0.95  # a replacement must need at most this share of the default's time


def use(cluster: Cluster | None) -> None:
    """Makes `algorithm=None` stand for the algorithm predicted to be fastest on a cluster.

    This applies in this process to all votes and means in codes over as many devices as the cluster
    has; jax's caches of compiled programs are cleared. Call it first, in every process. The devices
    of the mesh must be in the order of the cluster's. Another algorithm replaces the default where
    it is 5 % faster; gradients of `jaxcomm.sharded` parameters, which are only scattered, keep the
    default. A ring rounds every partial sum instead of only the final one, which is why coarse
    codes go directly by default.

    Args:
      cluster: `load_cluster("cluster.yaml")`; None restores the defaults.

    Raises:
      TypeError: for anything else, such as the name of a file.

    Example:
      >>> import jaxcomm
      >>> from jaxcomm import plan
      >>> plan.use(plan.cluster(plan.fabrics.clusters("two rooms", hosts=8, rate="100Mbit")))
      >>> tx = jaxcomm.mean("data", "int8")  # around a ring: few messages cross the middle
      >>> plan.use(None)
    """
    if cluster is None:
        note_choice(None)
        choose_by(None)
        return
    if not isinstance(cluster, Cluster):
        raise TypeError(
            f"plan.use takes a cluster, such as plan.load_cluster({cluster!r}), got "
            f"{type(cluster).__name__}."
        )
    model = cluster.network.model
    dimensions = dict(best_dimensions(cluster.topology, model, cluster.order))
    tried = [algorithms.from_name(name) for name in SCHEDULED]
    tried += [algorithms.halving_doubling(**dimensions)] if dimensions else []

    tried_for_votes = [*tried, *([] if cluster.devices % 2 else [algorithms.two_clusters()])]

    @functools.cache
    def seconds(
        algorithm: Algorithm, family: str, reduction: messages.Reduction, values: int
    ) -> float:
        is_hierarchical = isinstance(algorithm, Hierarchical)
        world = cluster.levels if is_hierarchical else cluster.devices
        network = cluster.network_of(algorithm)
        sent = network.exchange(algorithm, reduction, values, world).seconds
        ending = ending_of(algorithm.name, is_hierarchical)  # none is of two axes
        return sent + cluster.costs.local_seconds(family, values, ending)

    def chooser(reduction: Reduction, world: int, values: int, usual: Algorithm) -> Algorithm:
        known = _as_messages(reduction, world)
        if known is None or world != cluster.devices:
            return usual
        if isinstance(usual, Hierarchical) and usual.devices_per_host != cluster.devices_per_host:
            return usual  # the cluster's machines are others than those that jax sees
        is_mean = isinstance(known, messages.Coded)
        those = [a.for_means for a in tried] if is_mean else tried_for_votes
        family = reduction.codec.name if isinstance(reduction, CodedMean) else "vote"
        fastest = min(those, key=lambda algorithm: seconds(algorithm, family, known, values))
        taken, before = (seconds(a, family, known, values) for a in (fastest, usual))
        gains = taken <= _GAIN * before
        return fastest if gains else usual

    note_choice(cluster)
    choose_by(chooser)


def _as_messages(reduction: Reduction, world: int) -> messages.Reduction | None:
    """The sizes of its messages; None for reductions that are not planned."""
    if isinstance(reduction, CodedMean):
        return messages.Coded(reduction.codec, reduction.second_hop)
    if isinstance(reduction, Majority):
        abstains = reduction.zeros == "abstain"
        can_tie = reduction.ties == "zero" and world % 2 == 0
        return messages.Votes(1 + abstains, 1 + (abstains or can_tie))
    return None
