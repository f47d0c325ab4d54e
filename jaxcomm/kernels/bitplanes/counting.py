"""Counts per coordinate in bit planes: addition and comparisons, 32 coordinates to a word."""

import operator

import jax
import jax.numpy as jnp

from jaxcomm.kernels import _device
from jaxcomm.kernels.bitplanes.packing import require_words

Planes = tuple[jax.Array, ...]


def planes_for(k: int) -> int:
    """The number of planes that hold counts from 0 to k, ceil(log2(k + 1)).

    Raises:
      ValueError: if k is negative.
    """
    if k < 0:
        raise ValueError(f"counts run from 0 to k, so k must not be negative, got {k}.")
    return k.bit_length()


def add(a: Planes, b: Planes, width: int, *, implementation: str | None = None) -> Planes:
    """The sums of two counts per coordinate.

    Args:
      a: planes, least significant first.
      b: planes of the same shape; there may be more or fewer of them.
      width: the number of planes of the result. What does not fit into them is lost: a sum of two
        counts up to i and k needs `planes_for(i + k)`.
      implementation: "xla", "mosaic" (on NVIDIA GPUs), or None, which is "xla".

    Returns:
      `width` planes.

    Raises:
      TypeError: if a or b is not a tuple of uint32 arrays.
      ValueError: if width is less than the planes of a or b, or the shapes differ; and for 2^31
        words or more with "mosaic".
      NotImplementedError: for an implementation that does not exist here.
    """
    _require_planes(a, b)
    if width < max(len(a), len(b)):
        raise ValueError(
            f"a sum of {len(a)} and {len(b)} planes cannot have {width}; "
            f"pass a width of at least {max(len(a), len(b))}."
        )
    chosen = _device.choose("bitplanes.add", implementation, ("xla", "mosaic"), a[0].size)
    if chosen == "mosaic" and a[0].size:
        from jaxcomm.kernels.bitplanes import mosaic  # Pallas takes long to import

        return mosaic.add(a, b, width)
    return ripple_carry(a, b, width)


def ripple_carry(a: Planes, b: Planes, width: int) -> Planes:
    """`add` of planes that were checked."""
    carry = zero = jnp.zeros_like(a[0])
    sums = []
    for x, y in zip(_extend(a, width, zero), _extend(b, width, zero), strict=True):
        either = x ^ y
        sums.append(either ^ carry)
        carry = (x & y) | (either & carry)
    return tuple(sums)


def majority(
    a: Planes, b: Planes, threshold: int, *, implementation: str | None = None
) -> jax.Array:
    """A bit per coordinate: whether the sum of two counts is greater than the threshold.

    Args:
      a: planes, least significant first.
      b: planes of the same shape; there may be more or fewer of them.
      threshold: an integer, also one that sums cannot reach.
      implementation: as for `add`.

    Returns:
      uint32 words of the planes' shape, `exceeds` of the whole sum.

    Raises:
      TypeError: if a or b is not a tuple of uint32 arrays, or the threshold no integer.
      ValueError: if the shapes differ; and for 2^31 words or more with "mosaic".
      NotImplementedError: for an implementation that does not exist here.
    """
    _require_planes(a, b)
    chosen = _device.choose("bitplanes.majority", implementation, ("xla", "mosaic"), a[0].size)
    if chosen == "mosaic" and a[0].size:
        from jaxcomm.kernels.bitplanes import mosaic

        return mosaic.majority(a, b, threshold)
    return exceeds(ripple_carry(a, b, width_of_sum(a, b)), threshold)


def width_of_sum(a: Planes, b: Planes) -> int:
    """The planes that hold all sums of two counts."""
    return planes_for(2 ** len(a) + 2 ** len(b) - 2)


def exceeds(planes: Planes, threshold: int) -> jax.Array:
    """A bit per coordinate: whether its count is greater than the threshold.

    Bits that no coordinate owns compare like a count of zero.

    Args:
      planes: the counts, least significant plane first.
      threshold: an integer, also one that counts cannot reach.

    Returns:
      uint32 words of the planes' shape.

    Raises:
      TypeError: if planes is not a tuple of uint32 arrays, or the threshold no integer.
      ValueError: if the planes' shapes differ.
    """
    _require_planes(planes)
    threshold = min(operator.index(threshold), 2 ** len(planes) - 1)
    carry = jnp.zeros_like(planes[0])
    if threshold < 0:
        return ~carry
    # The carry out of count + (2^P - 1 - threshold), whose second digits are the threshold's
    # inverted; a chain of greater-or-equal would be two kernels on a GPU instead of one.
    for p, plane in enumerate(planes):
        carry = carry & plane if threshold >> p & 1 else carry | plane
    return carry


def equals(planes: Planes, value: int) -> jax.Array:
    """A bit per coordinate: whether its count is the value.

    Bits that no coordinate owns compare like a count of zero.

    Args:
      planes: the counts, least significant plane first.
      value: an integer, also one that counts cannot reach.

    Returns:
      uint32 words of the planes' shape.

    Raises:
      TypeError: if planes is not a tuple of uint32 arrays, or the value no integer.
      ValueError: if the planes' shapes differ.
    """
    _require_planes(planes)
    value = operator.index(value)
    equal = jnp.zeros_like(planes[0])
    if not 0 <= value < 2 ** len(planes):
        return equal
    equal = ~equal
    for p, plane in enumerate(planes):
        equal &= plane if value >> p & 1 else ~plane
    return equal


def greater(a: Planes, b: Planes) -> jax.Array:
    """A bit per coordinate: whether its count in a is greater than in b.

    Args:
      a: planes, least significant first.
      b: planes of the same shape; there may be more or fewer of them.

    Returns:
      uint32 words of the planes' shape.

    Raises:
      TypeError: if a or b is not a tuple of uint32 arrays.
      ValueError: if the shapes differ.
    """
    _require_planes(a, b)
    carry = zero = jnp.zeros_like(a[0])
    width = max(len(a), len(b))
    for x, y in zip(_extend(a, width, zero), _extend(b, width, zero), strict=True):
        carry = (x & ~y) | (carry & (x | ~y))  # the carry out of a + (2^P - 1 - b), as in `exceeds`
    return carry


def _extend(planes: Planes, width: int, zero: jax.Array) -> Planes:
    return planes + (zero,) * (width - len(planes))


def _require_planes(*stacks: Planes) -> None:
    for stack in stacks:
        if not isinstance(stack, tuple) or not stack:
            got = "an empty one" if isinstance(stack, tuple) else type(stack).__name__
            raise TypeError(
                f"planes are a tuple of at least one array, got {got}; "
                "write (words,) for counts up to one, and do not stack."
            )
    planes = [plane for stack in stacks for plane in stack]
    for plane in planes:
        require_words(plane)
    if len({plane.shape for plane in planes}) > 1:
        raise ValueError(
            f"planes have one shape, got {', '.join(str(plane.shape) for plane in planes)}; "
            "pack arrays of one shape."
        )
