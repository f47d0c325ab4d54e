"""What a message means: one reduction, as the steps that an algorithm calls.

N devices hold vectors x_0, ..., x_{N-1}, cut into blocks. A partial p_S is what the devices of a
set S have in common so far. For one block:

    p_{r} = start(prepare(x_r))         the partial of one device
    p_{A+B} = merge(p_A, p_B)           A and B have no device in common
    m = encode(p_S), decode(m) ~ p_S    the message that carries a partial towards the owner
    v = finish(p_{0..N-1})              the encoded result, which the owner sends to everyone
    y = restore(decode_result(v))       float32, the same bits on every device

    e1 = p_S - decode(m)                first-hop error: what a message loses of a partial
    e2 = p - N decode_result(v)         second-hop error: what the result loses of the full partial

The mean has p_S = sum of x_r over S, and v encodes p / N. The majority vote has p_S = the number of
positive signs in S, in bit planes, and v holds the winning signs.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax

from jaxcomm._axes import AxisName


class Prepared(NamedTuple):
    """One device's vector, ready to be cut into blocks and sent.

    Attributes:
      vector: a pytree of arrays of one length: what travels.
      replicated: a pytree of arrays of that length that are equal on all devices. It is cut into
        blocks as `vector` is, and never sent.
      shared_scale: what all devices know about the scaling of `vector`, for `restore`.
    """

    vector: Any
    replicated: Any = None
    shared_scale: Any = None


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A function of all devices' vectors that partial results can be merged into.

    Between `prepare` and `restore` every array has a leading axis of blocks, and each block is
    processed separately.

    Attributes:
      packed: how many values share an element of what travels.
    """

    packed: ClassVar[int] = 1

    @property
    def keeps_errors(self) -> bool:
        """Whether each device keeps the errors of its messages (error feedback)."""
        return False

    def padded(self, n: int, blocks: int) -> int:
        """The padded length, n or more, in which vectors of n values travel."""
        del blocks
        return n

    def filled(self, x: jax.Array, n: int, blocks: int) -> jax.Array:
        """A vector of `padded(n, blocks)` values with what its padding should hold: zeros."""
        del n, blocks
        return x

    def for_this_device(self, axis_name: AxisName) -> "Reduction":
        """The same reduction with what belongs to this device, such as its rounding key."""
        del axis_name
        return self

    def prepare(self, x: jax.Array, axis_name: AxisName) -> Prepared:
        """From one device's float32[n] to what travels."""
        raise NotImplementedError

    def start(self, blocks: Any, world: int) -> Any:
        """From blocks of one device's vector to its partial, with room for `world` devices."""
        raise NotImplementedError

    def merge(self, a: Any, b: Any) -> Any:
        """The partial of the devices of `a` and those of `b`; no device is in both."""
        raise NotImplementedError

    def merge_all(self, partials: Any) -> Any:
        """The partial of one block, from the partials along the leading axis, in order."""
        count = jax.tree.leaves(partials)[0].shape[0]
        parts = [jax.tree.map(lambda p, r=r: p[r : r + 1], partials) for r in range(count)]
        return functools.reduce(self.merge, parts)

    def encode(self, partial: Any, counts: tuple[int, ...], message_id: int) -> Any:
        """From a partial to a message.

        Args:
          partial: the blocks to send.
          counts: `counts[i]` is the number of devices that block i is a partial of.
          message_id: unique among a device's messages; random rounding folds it into its key.
        """
        raise NotImplementedError

    def decode(self, message: Any, counts: tuple[int, ...], like: Any) -> Any:
        """The partial in a message, with the shapes of `like`."""
        raise NotImplementedError

    def decode_and_merge(self, messages: Any, counts: tuple[int, ...], like: Any) -> Any:
        """The partial of one block, from several messages about it, merged in order.

        `like` has the shapes of the decoded messages along the leading axis.
        """
        return self.merge_all(self.decode(messages, counts, like))

    def merge_with_own(self, messages: Any, own: Any, place: jax.Array) -> Any:
        """The same, with the partial `own` for that of message `place`.

        Only called if `keeps_errors`: a device's own block is merged as it is, and leaves no error.
        """
        raise NotImplementedError

    def finish(self, partial: Any, replicated: Any, world: int) -> Any:
        """From the partial of all devices to the encoded result."""
        raise NotImplementedError

    def decode_result(self, result: Any, n: int) -> Any:
        """From encoded results to blocks of length n of what `restore` takes."""
        raise NotImplementedError

    def restore(self, vector: Any, shared_scale: Any, n: int) -> jax.Array:
        """From the joined blocks to float32[n]."""
        raise NotImplementedError

    def first_hop_error(self, partial: Any, message: Any) -> Any:
        """`partial` minus the decoded message; only called if `keeps_errors`."""
        raise NotImplementedError

    def second_hop_error(self, partial: Any, result: Any, world: int) -> Any:
        """The full partial minus `world` times the decoded result; only if `keeps_errors`."""
        raise NotImplementedError

    def residual(self, x: jax.Array, errors: jax.Array, shared_scale: Any) -> jax.Array:
        """float32[n]: what this device adds to its next vector.

        Args:
          x: this device's vector.
          errors: the joined blocks of its first- and second-hop errors.
          shared_scale: as in `Prepared`.
        """
        raise NotImplementedError

    def native(self, prepared: Prepared, axis_name: AxisName) -> Any:
        """What `restore` takes, by XLA's own all-reduce.

        Raises:
          NotImplementedError: if XLA has none for this reduction.
        """
        raise NotImplementedError

    def native_reduce_scatter(self, partial: Any, axis_name: AxisName) -> Any:
        """The full partial of this device's block, by XLA's own reduce-scatter.

        Raises:
          NotImplementedError: if XLA has none for this reduction.
        """
        raise NotImplementedError
