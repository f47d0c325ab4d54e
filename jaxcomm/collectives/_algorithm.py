"""What every all-reduce algorithm offers."""

import dataclasses
from typing import ClassVar

import jax

from jaxcomm.collectives._reduction import Reduction
from jaxcomm.collectives._run import run
from jaxcomm.collectives.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Who talks to whom in an all-reduce; what a message means is the reduction's.

    Attributes:
      name: the short form that factories accept as a string.
    """

    name: ClassVar[str]

    def schedule(self, world: int) -> Schedule:
        """Who sends which blocks to whom, for that many devices."""
        raise NotImplementedError

    def all_reduce(self, x: jax.Array, axis_name: str, reduction: Reduction) -> jax.Array:
        """Reduces the float32 vector `x` of every device over the axis, in the manual view.

        Args:
          x: float32[n], another on every device; any n >= 1.
          axis_name: the mesh axis to reduce over.
          reduction: what the messages mean.

        Returns:
          float32[n], bitwise equal on all devices of the axis.
        """
        schedule = self.schedule(jax.lax.axis_size(axis_name))
        return run(x, axis_name, reduction, schedule)
