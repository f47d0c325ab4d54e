"""Addition of planes as one Mosaic kernel, which reads and writes every plane once."""

from typing import Any

import jax.numpy as jnp

from jaxcomm.kernels._mosaic import over_columns, widened
from jaxcomm.kernels.bitplanes.counting import Planes, ripple_carry


def add(a: Planes, b: Planes, width: int, *, interpret: Any = None) -> Planes:
    """The same planes as `ripple_carry`; `interpret` as in `over_columns`."""
    shape, size = a[0].shape, a[0].size

    def body(at: Any, *refs: Any) -> None:
        words = tuple(ref[at(0)] for ref in refs[: len(a) + len(b)])
        sums = ripple_carry(words[: len(a)], words[len(a) :], width)
        for ref, plane in zip(refs[len(words) :], sums, strict=True):
            ref[at(0)] = plane

    planes = [widened(plane.reshape(-1), 1, size) for plane in (*a, *b)]
    room = planes[0].size
    outputs = [(room, jnp.uint32)] * width
    results = over_columns(body, planes, outputs, room, room, interpret=interpret)
    return tuple(result[:size].reshape(shape) for result in results)
