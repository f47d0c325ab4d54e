"""What every reduction offers: the meaning of a message, and how two of them become one."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from jaxcomm._compat import AxisName


class Lifted(NamedTuple):
    """One device's vector, ready to be cut into blocks and sent.

    Attributes:
      vector: a pytree of arrays of one length, which is what travels.
      beside: a pytree of arrays of that length which all devices hold alike; it is cut likewise,
        and never sent.
      agreed: what the devices have agreed on, for `lower`.
    """

    vector: Any
    beside: Any = None
    agreed: Any = None


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A function of all devices' vectors that partial results can be merged into.

    Between `lift` and `lower`, everything has a leading axis of blocks, and each block is treated
    by itself. A partial is what some of the devices have in common so far; messages carry encoded
    partials to the owner of a block, and the encoded value back to everyone.
    """

    @property
    def keeps_errors(self) -> bool:
        """Whether each device keeps what its messages do not say."""
        return False

    def on_this_device(self, axis_name: AxisName) -> "Reduction":
        """The same with what this device alone has, such as a key of its own."""
        del axis_name
        return self

    def lift(self, x: jax.Array, axis_name: AxisName) -> Lifted:
        """From one device's float32[n] to what travels."""
        raise NotImplementedError

    def start(self, blocks: Any, world: int) -> Any:
        """From blocks of one device's vector to partials of one device, of `world` in the end."""
        raise NotImplementedError

    def merge(self, a: Any, b: Any) -> Any:
        """The partial of the devices of `a` and those of `b`, which are others."""
        raise NotImplementedError

    def encode(self, partial: Any, counts: tuple[int, ...], hop: int) -> Any:
        """From a partial to a message; block i is of `counts[i]` devices.

        `hop` is a positive number that no two messages of a device share.
        """
        raise NotImplementedError

    def decode(self, message: Any, counts: tuple[int, ...], like: Any) -> Any:
        """The partial in a message, shaped as `like`."""
        raise NotImplementedError

    def total(self, messages: Any, counts: tuple[int, ...], like: Any) -> Any:
        """The partial of one block that several messages about it add up to, in their order.

        `like` is shaped as the partials in the messages, which are side by side.
        """
        return self.merged(self.decode(messages, counts, like))

    def merged(self, partials: Any) -> Any:
        """The partial of one block that those side by side add up to, in their order."""
        count = jax.tree.leaves(partials)[0].shape[0]
        parts = [jax.tree.map(lambda p, r=r: p[r : r + 1], partials) for r in range(count)]
        return functools.reduce(self.merge, parts)

    def finish(self, partial: Any, beside: Any, world: int) -> Any:
        """From a partial of all devices to the encoded value."""
        raise NotImplementedError

    def unsaid(self, partial: Any, message: Any) -> Any:
        """What a message does not say of a partial, if `keeps_errors`."""
        raise NotImplementedError

    def owed(self, partial: Any, value: Any, world: int) -> Any:
        """What the encoded value does not say of the partial of all devices, likewise."""
        raise NotImplementedError

    def errors(self, x: jax.Array, unsaid: Any, agreed: Any) -> jax.Array:
        """From the joined blocks of what was not said of x, to float32[n]: what x should add."""
        raise NotImplementedError

    def read(self, value: Any, n: int) -> Any:
        """From encoded values to blocks of length n of what `lower` takes."""
        raise NotImplementedError

    def lower(self, vector: Any, agreed: Any, n: int) -> jax.Array:
        """From the joined blocks to float32[n]."""
        raise NotImplementedError

    def native(self, lifted: Lifted, axis_name: AxisName) -> Any:
        """What `lower` takes, by XLA's own collective.

        Raises:
          ValueError: if XLA has none for this reduction.
        """
        raise NotImplementedError
