"""Counts per coordinate in bit planes: addition and comparisons, 32 coordinates to a word."""

import operator

import jax
import jax.numpy as jnp

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


def add(a: Planes, b: Planes, width: int) -> Planes:
    """The sums of two counts per coordinate.

    Args:
      a: planes, least significant first.
      b: planes of the same shape; there may be more or fewer of them.
      width: the number of planes of the result. Higher bits of a sum are lost; a sum of counts up
        to i and k needs `planes_for(i + k)` planes.

    Returns:
      `width` planes.

    Raises:
      TypeError: if a or b is not a tuple of uint32 arrays.
      ValueError: if width is less than the planes of a or b, or the shapes differ.
    """
    require_planes(a, b)
    if width < max(len(a), len(b)):
        raise ValueError(
            f"a sum of {len(a)} and {len(b)} planes cannot have {width}; "
            f"pass a width of at least {max(len(a), len(b))}."
        )
    carry = zero = jnp.zeros_like(a[0])
    sums = []
    for x, y in zip(_extend(a, width, zero), _extend(b, width, zero), strict=True):
        either = x ^ y
        sums.append(either ^ carry)
        carry = (x & y) | (either & carry)
    return tuple(sums)


def exceeds(planes: Planes, threshold: int) -> jax.Array:
    """A bit per coordinate: whether its count is greater than the threshold.

    Bits without a coordinate compare like a count of zero.

    Args:
      planes: the counts, least significant plane first.
      threshold: an integer, possibly outside the range of the counts.

    Returns:
      uint32 words of the planes' shape.

    Raises:
      TypeError: if planes is not a tuple of uint32 arrays, or the threshold is not an integer.
      ValueError: if the planes' shapes differ.
    """
    require_planes(planes)
    threshold = min(operator.index(threshold), 2 ** len(planes) - 1)
    carry = jnp.zeros_like(planes[0])
    if threshold < 0:
        return ~carry
    # The carry out of count + (2^P - 1 - threshold); the digits of the second term are those of the
    # threshold, inverted. On a GPU this is one kernel; a chain of greater and equal would be two.
    for p, plane in enumerate(planes):
        carry = carry & plane if threshold >> p & 1 else carry | plane
    return carry


def equals(planes: Planes, value: int) -> jax.Array:
    """A bit per coordinate: whether its count is the value.

    Bits without a coordinate compare like a count of zero.

    Args:
      planes: the counts, least significant plane first.
      value: an integer, possibly outside the range of the counts.

    Returns:
      uint32 words of the planes' shape.

    Raises:
      TypeError: if planes is not a tuple of uint32 arrays, or the value is not an integer.
      ValueError: if the planes' shapes differ.
    """
    require_planes(planes)
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
    require_planes(a, b)
    carry = zero = jnp.zeros_like(a[0])
    width = max(len(a), len(b))
    for x, y in zip(_extend(a, width, zero), _extend(b, width, zero), strict=True):
        carry = (x & ~y) | (carry & (x | ~y))  # the carry out of a + (2^P - 1 - b), as in `exceeds`
    return carry


def _extend(planes: Planes, width: int, zero: jax.Array) -> Planes:
    return planes + (zero,) * (width - len(planes))


def require_planes(*stacks: Planes) -> None:
    """Raises for anything but non-empty tuples of uint32 arrays of one shape."""
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
