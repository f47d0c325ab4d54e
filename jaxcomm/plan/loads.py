"""What is exchanged in a step, and how long the step takes without it."""

import dataclasses
import math
from typing import Any

import jax

_SIDE = 1024  # of the square matrices that a number of parameters is taken for
_FORWARD = 1 / 3  # of a step


@dataclasses.dataclass(frozen=True)
class Workload:
    """The gradients of a model, and its step.

    Attributes:
      shapes: of the leaves, in the order of the parameters.
      step_seconds: of forward, backward and the optimizer, for one microbatch.
      accumulate: microbatches between two exchanges.
    """

    shapes: tuple[tuple[int, ...], ...]
    step_seconds: float
    accumulate: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.step_seconds < float("inf"):
            raise ValueError(f"a step takes a positive time, got {self.step_seconds!r} s.")
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ValueError(f"accumulate is 1, 2, ..., got {self.accumulate!r}.")
        if not self.values:
            raise ValueError("there are no parameters.")

    @property
    def values(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def compute_seconds(self) -> float:
        """Of all microbatches between two exchanges."""
        return self.accumulate * self.step_seconds

    def ready(self, bucket: int, buckets: int) -> float:
        """When the gradients of a bucket are there: evenly over the last backward pass."""
        backward = (1 - _FORWARD) * self.step_seconds
        return self.compute_seconds - backward * (1 - (bucket + 1) / buckets)


def workload(params: Any, step_ms: float, accumulate: int = 1) -> Workload:
    """A workload.

    Args:
      params: a pytree of arrays or of shapes (`jax.eval_shape`); or their number, which is then
        taken for square matrices.
      step_ms: milliseconds of a step without any exchange.
      accumulate: microbatches between two exchanges.

    Raises:
      ValueError: for no parameters, or times that are not positive.
    """
    if isinstance(params, int | float) and not isinstance(params, bool):
        if not 1 <= params < float("inf"):
            raise ValueError(f"params is a number of parameters, got {params!r}.")
        whole, rest = divmod(round(params), _SIDE**2)
        shapes = ((_SIDE, _SIDE),) * whole + (((rest,),) if rest else ())
        if rest >= 2 * _SIDE:
            rows = rest // _SIDE
            shapes = (*shapes[:-1], (rows, _SIDE))
            shapes += ((rest - rows * _SIDE,),) if rest % _SIDE else ()
    else:
        shapes = tuple(tuple(leaf.shape) for leaf in _shaped(params))
    return Workload(shapes, step_ms / 1e3, accumulate)


def _shaped(params: Any) -> list[Any]:
    leaves = jax.tree.leaves(params)
    wrong = [leaf for leaf in leaves if not hasattr(leaf, "shape")]
    if wrong:
        raise ValueError(
            f"params is a pytree of arrays or of shapes, or their number, got {wrong[0]!r} in it."
        )
    return leaves
