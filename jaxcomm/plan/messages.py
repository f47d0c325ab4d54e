"""How many bytes a message has: what a reduction sends for a partial and for a result."""

import dataclasses
import math
from typing import Protocol

from jaxcomm.plan.steps import Codec, Step

_WORD = 32  # coordinates in a word of a bit plane


class Reduction(Protocol):
    """What a message means, as its bytes."""

    def bytes_of(self, step: Step, n: int) -> float:
        """The bytes of each message of a step, for vectors of n values."""
        ...


def _length(step: Step, n: int) -> int:
    """The values of a block, padding included."""
    return -(-n // step.of)


@dataclasses.dataclass(frozen=True)
class Shares:
    """Messages of any content, each as large as its share of `vector_bytes`.

    Attributes:
      vector_bytes: the bytes of a whole vector.

    Raises:
      ValueError: for a negative number of bytes.
    """

    vector_bytes: float

    def __post_init__(self) -> None:
        if not self.vector_bytes >= 0:
            raise ValueError(f"a vector has 0 bytes or more, got {self.vector_bytes!r}.")

    def bytes_of(self, step: Step, n: int) -> float:
        """See `Reduction`."""
        del n
        return step.share * self.vector_bytes


@dataclasses.dataclass(frozen=True)
class Coded:
    """A mean: partials in one format, results in another or the same.

    Attributes:
      codec: the codec of partials, such as `jaxcomm.codecs.bfloat16()`.
      second_hop: the codec of results; None means the same.
    """

    codec: Codec
    second_hop: Codec | None = None

    def bytes_of(self, step: Step, n: int) -> int:
        """See `Reduction`."""
        codec = self.second_hop if step.is_result and self.second_hop else self.codec
        return step.blocks * (step.codec or codec).message_bytes(_length(step, n))


@dataclasses.dataclass(frozen=True)
class Votes:
    """A majority of signs in bit planes: a partial of k devices has ceil(log2(k + 1)) of them.

    Attributes:
      partials: the counts for each value: 1, or 2 where zeros abstain.
      results: the bits of each result: 1, or 2 where a result may be zero.
    """

    partials: int = 1
    results: int = 1

    def bytes_of(self, step: Step, n: int) -> int:
        """See `Reduction`; the step must have counts or carry results."""
        if step.is_result:
            planes = self.results * step.blocks
        else:
            assert step.counts is not None, "steps(..., with_counts=True)"
            planes = self.partials * sum(count.bit_length() for count in step.counts)
        return planes * math.ceil(_length(step, n) / _WORD) * 4


@dataclasses.dataclass(frozen=True)
class PerBlock:
    """Messages of a fixed size for each N-th of the vector.

    Attributes:
      world: N.
      there: the bytes of each N-th of a vector on its way to its owner.
      back: the bytes of each N-th on its way to everyone.
    """

    world: int
    there: float
    back: float

    def bytes_of(self, step: Step, n: int) -> float:
        """See `Reduction`."""
        del n
        return step.share * self.world * (self.back if step.is_result else self.there)


@dataclasses.dataclass(frozen=True)
class BetweenHosts:
    """Messages between hosts of a part of the vector, which within hosts is sent in float32.

    Attributes:
      part: how many bytes the messages of a part have.
      parts: the number of parts, one for each device of a host.
    """

    part: Reduction
    parts: int

    def bytes_of(self, step: Step, n: int) -> float:
        """See `Reduction`."""
        if step.within:
            return 4 * step.blocks * _length(step, n)
        return self.part.bytes_of(
            dataclasses.replace(step, of=step.of // self.parts), -(-n // self.parts)
        )


@dataclasses.dataclass(frozen=True)
class Lists:
    """Every message of the reduce-scatter is a whole list; all devices then have the result.

    Only a device that handed over its whole vector, because N is not a power of two, is sent the
    result.

    Attributes:
      list_bytes: the bytes of each list.
      answer_bytes: the bytes that go with a result and say which of the device's entries are in it.
    """

    list_bytes: float
    answer_bytes: float

    def bytes_of(self, step: Step, n: int) -> float:
        """See `Reduction`."""
        del n
        if not step.is_result:
            return self.list_bytes
        return self.list_bytes + self.answer_bytes if step.share == 1 else 0.0
