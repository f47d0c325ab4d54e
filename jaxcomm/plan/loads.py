"""What is exchanged in a step, and how long the step takes without it."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from jaxcomm._numbers import is_integer, is_real
from jaxcomm._paths import path_name
from jaxcomm.transforms._layout import is_exempt
from jaxcomm.transforms._options import Exempt, check_patterns

_SIDE = 1024  # of the square matrices that stand for a number of parameters
_MOST = 1e12  # parameters
_FORWARD = 1 / 3  # of a step


@dataclasses.dataclass(frozen=True)
class Workload:
    """The gradients of a model, and its step.

    Attributes:
      shapes: the shapes of the leaves, in the order of the parameters.
      step_seconds: seconds of the forward pass, the backward pass and the optimizer, for one
        microbatch.
      accumulate: microbatches between two exchanges.
      exempt: for each leaf, whether it travels in float32 by every method; () if none does.
      also_exempt: the `exempt` of the transformation that the plan makes.
    """

    shapes: tuple[tuple[int, ...], ...]
    step_seconds: float
    accumulate: int = 1
    exempt: tuple[bool, ...] = ()
    also_exempt: Exempt = ()

    def __post_init__(self) -> None:
        if not 0 < self.step_seconds < float("inf"):
            raise ValueError(f"a step takes a positive time, got {self.step_seconds!r} s.")
        if not is_integer(self.accumulate) or self.accumulate < 1:
            raise ValueError(f"accumulate is 1, 2, ..., got {self.accumulate!r}.")
        if len(self.exempt) not in (0, len(self.shapes)):
            raise ValueError(
                f"exempt has {len(self.exempt)} entries for {len(self.shapes)} leaves; write () if "
                "no leaf is exempt."
            )
        if not self.values:
            raise ValueError(
                "workload takes a pytree of arrays, or a number of parameters such as 25.6e6; this "
                "tree has no values."
            )

    @functools.cached_property
    def values(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    @functools.cached_property
    def large(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the leaves that are not exempt."""
        flags = self.exempt or (False,) * len(self.shapes)
        return tuple(shape for shape, flag in zip(self.shapes, flags, strict=True) if not flag)

    @functools.cached_property
    def exempt_values(self) -> int:
        """The number of parameters that travel in float32 by every method."""
        return self.values - sum(math.prod(shape) for shape in self.large)

    @property
    def compute_seconds(self) -> float:
        """Seconds of all microbatches between two exchanges."""
        return self.accumulate * self.step_seconds

    def ready(self, share: float) -> float:
        """When this share of the gradients is ready: evenly over the last backward pass."""
        backward = (1 - _FORWARD) * self.step_seconds
        return self.compute_seconds - backward * (1 - share)


def workload(params: Any, step_ms: float, accumulate: int = 1, exempt: Exempt = ()) -> Workload:
    """What is exchanged in a step, and how long the step takes without it.

    Args:
      params: a pytree of arrays or of shapes (`jax.eval_shape`); or the number of parameters, which
        then stands for square matrices, none of them exempt. Every value counts as a float32, as
        exchanges send it by default, whatever its dtype.
      step_ms: milliseconds of a step without any exchange.
      accumulate: microbatches between two exchanges.
      exempt: which leaves travel in float32 by every method, as in `jaxcomm.mean`.

    Returns:
      The workload, for `jaxcomm.plan.plan`.

    Raises:
      TypeError: for a time that is not a number.
      ValueError: for no parameters, times that are not positive, or patterns that fit no leaf.
    """
    if not is_real(step_ms):
        raise TypeError(f"step_ms is a number of milliseconds, got {step_ms!r}.")
    if isinstance(params, np.generic | np.ndarray | jax.Array) and params.ndim == 0:
        params = params.item()
    if is_real(params):
        if exempt:
            raise ValueError("a number of parameters has no names to exempt; give a pytree.")
        if not 1 <= float(params) <= _MOST:
            raise ValueError(f"params is a number of 1 to {_MOST:g} parameters, got {params!r}.")
        whole, rest = divmod(round(float(params)), _SIDE**2)
        shapes = ((_SIDE, _SIDE),) * whole + (((rest,),) if rest else ())
        if rest >= 2 * _SIDE:
            rows = rest // _SIDE
            shapes = (*shapes[:-1], (rows, _SIDE))
            shapes += ((rest - rows * _SIDE,),) if rest % _SIDE else ()
        return Workload(shapes, step_ms / 1e3, accumulate)
    leaves = _leaves(params)
    if not callable(exempt):
        check_patterns(exempt, [path for path, _ in leaves])
    leaves = [(path, shape) for path, shape in leaves if math.prod(shape)]  # others send nothing
    flags = tuple(is_exempt(path, shape, False, exempt) for path, shape in leaves)
    shapes = tuple(shape for _, shape in leaves)
    also = exempt if callable(exempt) else tuple(exempt)
    return Workload(shapes, step_ms / 1e3, accumulate, flags, also)


def _leaves(params: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The path and the shape of each leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    wrong = [leaf for _, leaf in leaves if not hasattr(leaf, "shape")]
    if wrong:
        raise ValueError(
            f"params is a pytree of arrays or of shapes, or their number, got {wrong[0]!r} in it."
        )
    return [(path_name(path), tuple(leaf.shape)) for path, leaf in leaves]
