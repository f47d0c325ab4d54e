"""Which arrays are computed while a message travels.

XLA's scheduler for GPUs goes through a program from its end. It schedules a kernel as soon as
nothing that is left needs its result. Between the two hops of a sparse mean there are dozens of
short kernels, each of which needs the one before. By the time the scheduler reaches the first hop,
it has scheduled all matrix products, and nothing is left to hide the message.

So the result of a collective and the next gradient leave a barrier together. The scheduler then
cannot schedule the product that makes this gradient before it reaches the message.
"""

import contextvars
from contextlib import AbstractContextManager
from typing import Any

import jax

from jaxcomm._context import holding


class Behind:
    """Arrays that are computed while messages travel.

    Attributes:
      arrays: these arrays, by key. Every use must read them from here, because barriers replace
        them.
      turns: the keys of the remaining arrays, in the order in which they are computed. Each
        collective takes one.
    """

    def __init__(self, arrays: dict[Any, jax.Array], turns: list[Any]) -> None:
        self.arrays, self.turns = arrays, turns

    def next(self, arrived: Any) -> Any:
        """The result of a collective, which is not available before the next array is."""
        if not self.turns:
            return arrived
        key = self.turns.pop(0)
        arrived, self.arrays[key] = jax.lax.optimization_barrier((arrived, self.arrays[key]))
        return arrived


_BEHIND: contextvars.ContextVar[Behind | None] = contextvars.ContextVar("behind", default=None)


def travelling(behind: Behind | None) -> AbstractContextManager[None]:
    """Inside, collectives that call `behind_next` take turns; with None they do not."""
    return holding(_BEHIND, behind)


def behind_next(arrived: Any) -> Any:
    """`Behind.next` of the result of a collective; outside `travelling`, the result itself."""
    behind = _BEHIND.get()
    return arrived if behind is None else behind.next(arrived)
