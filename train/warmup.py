"""When a method's own warm-up ends: 1-bit Adam's state says so, in the field `frozen_at`."""

from collections.abc import Callable
from typing import Any

import jax

FIELD = "frozen_at"  # int32: the step of the method that ended its warm-up; 0 until one has.


def frozen_at(opt_state: Any) -> jax.Array | None:
    """The leaf of an optimizer's state whose field is named `frozen_at`, wherever it lies.

    Returns:
      The leaf, or None where no method has a warm-up of its own. Of several, the first.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        # A dict's key has no name: a parameter called `frozen_at` is not meant.
        if getattr(path[-1], "name", None) == FIELD:
            return leaf
    return None


def step_of(opt_state: Any) -> int:
    """`frozen_at` on the host, which waits for the devices; 0 where no warm-up has ended."""
    leaf = frozen_at(opt_state)
    return 0 if leaf is None else int(leaf)


def watched(step: Callable[..., tuple[Any, dict[str, Any]]]) -> Callable[..., Any]:
    """Adds `frozen_at` to the metrics of a training step, if the optimizer's state has it.

    The state's own buffer is gone when the next step starts; a metric is kept, and is read with
    the others while the devices do the next step.

    Args:
      step: `(state, batch) -> (state, metrics)`, where `state.opt_state` is the optimizer's.

    Returns:
      A step of the same signature.
    """

    def watched_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        state, metrics = step(state, batch)
        leaf = frozen_at(state.opt_state)
        return state, metrics if leaf is None else {**metrics, FIELD: leaf}

    return watched_step
