"""What every reduction offers: the meaning of a message, and how two of them become one."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A function of all devices' vectors that partial results can be merged into.

    All methods keep a leading axis of blocks, `(b, n)`, and treat each block by itself. A partial
    is what some of the devices have in common so far; messages carry encoded partials on the way
    to the owner of a block, and the encoded value on the way back.

    Attributes:
      granularity: the number of elements that a block's length must be a multiple of.
    """

    granularity = 1

    def normalise(self, x: jax.Array, axis_name: str) -> tuple[jax.Array, Any]:
        """What devices must agree on first: x to send, and what `restore` needs afterwards."""
        del axis_name
        return x, None

    def restore(self, y: jax.Array, agreed: Any) -> jax.Array:
        """Takes back what `normalise` did."""
        del agreed
        return y

    def lift(self, x: jax.Array) -> Any:
        """float32[b, n], one device's values, to a partial of one device."""
        raise NotImplementedError

    def merge(self, a: Any, b: Any) -> Any:
        """The partial of the devices of `a` and those of `b`, which are others."""
        raise NotImplementedError

    def encode(self, partial: Any, counts: tuple[int, ...]) -> Any:
        """A partial to a message; block i is of `counts[i]` devices."""
        raise NotImplementedError

    def decode(self, message: Any, counts: tuple[int, ...], n: int) -> Any:
        """The partial in a message."""
        raise NotImplementedError

    def finish(self, partial: Any, world: int) -> Any:
        """A partial of all devices to the encoded result."""
        raise NotImplementedError

    def read(self, value: Any, n: int) -> jax.Array:
        """The encoded result as float32[b, n]."""
        raise NotImplementedError

    def native(self, x: jax.Array, axis_name: str) -> jax.Array:
        """float32[n] reduced by XLA's own collective, where it can."""
        raise NotImplementedError
