"""The sum of two counts per coordinate, by one of its implementations."""

from jaxcomm.kernels import _implementations
from jaxcomm.kernels.bitplanes.counting import Planes, require_planes, ripple_carry


def add(
    a: Planes, b: Planes, width: int, *, implementation: _implementations.Option = None
) -> Planes:
    """The sums of two counts per coordinate.

    Args:
      a: planes, least significant first.
      b: planes of the same shape; there may be more or fewer of them.
      width: the number of planes of the result. Higher bits of a sum are lost: a sum of two counts
        up to i and k needs `planes_for(i + k)` planes.
      implementation: "xla", "mosaic" (on NVIDIA GPUs), or another option of `_implementations`;
        None is "xla".

    Returns:
      `width` planes.

    Raises:
      TypeError: if a or b is not a tuple of uint32 arrays.
      ValueError: if width is less than the planes of a or b, or the shapes differ; and for 2^31
        words or more with "mosaic".
      NotImplementedError: for an implementation that does not exist here.
    """
    require_planes(a, b)
    if width < max(len(a), len(b)):
        raise ValueError(
            f"a sum of {len(a)} and {len(b)} planes cannot have {width}; "
            f"pass a width of at least {max(len(a), len(b))}."
        )

    def run(name: str, a: Planes, b: Planes) -> Planes:
        if name == "mosaic":
            from jaxcomm.kernels.bitplanes import mosaic  # Pallas takes long to import

            return mosaic.add(a, b, width)
        return ripple_carry(a, b, width)

    return _implementations.call(
        "bitplanes.add", implementation, run, (a, b), elements=a[0].size, static=(width,)
    )
