"""Which algorithm None stands for: the plan's choice, or one that needs no measurement."""

import dataclasses
import math
from collections.abc import Callable, Set
from typing import Any

import jax

from jaxcomm import _hosts, codecs
from jaxcomm._axes import Axis, AxisName, Part
from jaxcomm._notes import noted
from jaxcomm.collectives.algorithms._algorithm import Algorithm
from jaxcomm.collectives.algorithms._algorithm import length as length_of
from jaxcomm.collectives.algorithms.circulant import circulant
from jaxcomm.collectives.algorithms.direct import direct
from jaxcomm.collectives.algorithms.halving_doubling import halving_doubling
from jaxcomm.collectives.algorithms.hierarchical import Hierarchical
from jaxcomm.collectives.algorithms.ring import ring, two_way_ring
from jaxcomm.collectives.reductions import Prepared, Reduction
from jaxcomm.kernels import _device

FEW = 16  # devices, for votes
MANY = 32  # devices, for means
FEW_OF_CNAT = 8
# Bytes, as they travel, with one bit for a vote. For a short vector the number of rounds decides,
# and the more devices there are, the more rounds are saved. For longer vectors bytes matter too,
# and a ring sends the fewest across a slow link in the middle.
SHORT_PER_DEVICE = 6 * 2**10  # of a mean
SHORT_VOTES = 24 * 2**10
MEDIUM_VOTES = 64 * 2**10
_BITS = {"votes": 1, "8 bits": 8, "16 bits": 16}  # of a value
_FINE = ("8 bits", "16 bits")  # fine enough for partial sums to be rounded at every hop

# From a reduction, the number of devices, the number of values, and the default algorithm to the
# algorithm that is used.
Chooser = Callable[[Reduction, int, int, Algorithm], Algorithm]
_chooser: Chooser | None = None


def choose_by(chooser: Chooser | None) -> None:
    """Sets who chooses in this process from now on; None leaves it to `Default`.

    Programs that jax traced before would keep other algorithms than those that are traced anew, and
    another process may have traced fewer. So all traced programs are dropped from jax's caches.
    """
    global _chooser  # noqa: PLW0603
    if chooser is not _chooser:
        jax.clear_caches()
    _chooser = chooser


@dataclasses.dataclass(frozen=True)
class Default(Algorithm):
    """Chosen when the number of devices is known; `jaxcomm.plan.use` overrides it.

    - Where hosts have several devices each, these first add up among themselves, means in float32,
      and send one vector to the other hosts. What follows is chosen for the hosts, and for the
      part of the vector that a device then has. Going directly, every device would send its own to
      all other hosts: of 4 hosts of 8 devices, 7 vectors would leave each, where 1.5 do.
    - Votes go directly: no other algorithm sends as few bits. On more than 16 devices, whose blocks
      are small, they take the few rounds of the circulant graph.
    - Values of 16 bits and int8 go around a ring between CPU processes. On one switch it is as fast
      as going directly, and across a slow link in the middle 1.6 times as fast. Each partial sum is
      rounded.
    - Values in cnat go around a ring in both directions on 3 to 8 CPU processes. That takes 1 to
      2 % longer than one direction, in which their error on 8 devices is 1.5 times that of going
      directly. In both directions the error equals that of going directly on 4 devices, and is 1.3
      times as large on 8 (tests/collectives/test_quantized.py).
    - On more than 32 CPU processes all means take the circulant graph. The 2(N-1) rounds of the
      others cost more time than the bytes that they save, each round is part of the program to
      compile, and around a ring the error grows with the square root of N.
    - Short vectors take few rounds between CPU processes, where a round costs more than its bytes.
      16 bits and int8 take the circulant graph. Votes take halving and doubling if N is a power of
      two; otherwise that would send some of them twice, and they take the circulant graph. Votes
      that are not quite as short take the circulant graph if N is a power of two.
    - Everything else goes directly: each value is rounded once, and each sum once.

    Attributes:
      sent: "votes", "16 bits", "8 bits" (int8), "cnat", "codes", which are coarser, or "shards",
        which are only scattered.
    """

    sent: str
    name = "default"

    def of(self, world: int, values: int | None = None, per_host: int = 1) -> Algorithm:
        """The choice for this many devices without a plan.

        Args:
          world: the number of devices.
          values: the length of the vector; None means unknown and counts as long.
          per_host: the devices of each host, which follow each other; 1 if they do not.
        """
        return usual(self.sent, world, _device.is_between_cpu_processes(), values, per_host)

    def warn_of_mesh(self, axis_name: AxisName) -> None:
        """See `Algorithm.warn_of_mesh`: where hosts are not what they are assumed to be."""
        _hosts.warn_of_order(axis_name)

    def all_reduce(
        self, prepared: Prepared, axis_name: AxisName, reduction: Reduction
    ) -> tuple[Any, Any]:
        """See `Algorithm.all_reduce`."""
        values = length_of(prepared.vector) * reduction.packed
        chosen = self.chosen(axis_name, reduction, values)
        with noted((reduction, chosen)):
            return chosen.all_reduce(prepared, axis_name, reduction)

    def reduce_scatter(
        self, partial: Any, axis_name: Axis, reduction: Reduction, devices_per_partial: int
    ) -> tuple[Any, Any]:
        """See `Algorithm.reduce_scatter`."""
        assert not isinstance(axis_name, Part), "a level of hierarchical names its algorithm"
        world = jax.lax.axis_size(axis_name)
        chosen = self.of(world, None, _hosts.devices_per_host(axis_name))
        with noted((reduction, chosen)):
            return chosen.reduce_scatter(partial, axis_name, reduction, devices_per_partial)

    def chosen(self, axis_name: AxisName, reduction: Reduction, values: int) -> Algorithm:
        """See `Algorithm.chosen`: by the plan in use, or what is usual."""
        world = jax.lax.axis_size(axis_name)
        of_itself = self.of(world, values, _hosts.devices_per_host(axis_name))
        return of_itself if _chooser is None else _chooser(reduction, world, values, of_itself)


def sent_as(names: Set[str]) -> str:
    """What `Default` calls codecs of these names."""
    if names <= {"bfloat16", "float16"}:
        return "16 bits"
    if names == {"cnat"}:
        return "cnat"
    return "8 bits" if names == {"int8"} else "codes"


def usual(
    sent: str, world: int, between_cpus: bool, values: int | None = None, per_host: int = 1
) -> Algorithm:
    """What `Default` stands for, on CPUs of several processes or elsewhere."""
    if 1 < per_host < world:
        part = None if values is None else -(-values // per_host)
        far = usual(sent, world // per_host, between_cpus, part)
        near_codec = None if sent == "votes" else codecs.float32()
        return Hierarchical(direct(), far, near_codec, per_host)
    if sent == "shards":
        return direct()
    size = math.inf if values is None else values * _BITS.get(sent, 0) / 8
    is_power = world & (world - 1) == 0
    short = SHORT_VOTES if sent == "votes" else SHORT_PER_DEVICE * world
    if sent != "votes" and between_cpus and (world > MANY or sent in _FINE and size <= short):
        return circulant().for_means
    if sent == "votes" and size <= short and between_cpus:
        return halving_doubling() if is_power else circulant()
    if sent == "votes" and size <= MEDIUM_VOTES and between_cpus and is_power:
        return circulant()
    if sent == "votes" and world > FEW:
        return circulant()
    if sent in _FINE and between_cpus:
        return ring()
    if sent == "cnat" and between_cpus and 2 < world <= FEW_OF_CNAT:
        return two_way_ring()
    return direct()
