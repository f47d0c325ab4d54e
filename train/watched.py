"""Reads what methods report in their states.

The field `frozen_at` of 1-bit Adam is the step at which its warm-up ended. The field `report` of a
sparse mean has what it selected and delivered. Methods with error feedback have residuals.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

REPORT = "report"  # A named tuple of float32 numbers.
FIELD = "frozen_at"  # int32: the step of the method that ended its warm-up; 0 until one has.
RESIDUALS = ("residual", "worker_error")  # [devices, ...]: what each device has not sent.


def frozen_at(opt_state: Any) -> jax.Array | None:
    """The leaf of an optimizer's state whose field is named `frozen_at`, wherever it is.

    Returns:
      The leaf, or None if no method has its own warm-up. Of several, the first.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        # A dict's key has no name: a parameter called `frozen_at` is not meant.
        if getattr(path[-1], "name", None) == FIELD:
            return leaf
    return None


def reported(opt_state: Any) -> dict[str, jax.Array]:
    """The numbers of every field named `report` in an optimizer's state, by `report/name`."""
    return {
        f"{REPORT}/{path[-1].name}": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)
        if len(path) > 1 and getattr(path[-2], "name", None) == REPORT
    }


def residual_norm(opt_state: Any) -> dict[str, jax.Array]:
    """The norm of a device's residuals, root mean square over the devices, as `residual_norm`.

    Empty if no method keeps residuals.
    """
    found = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)
        if any(getattr(key, "name", None) in RESIDUALS for key in path)
    ]
    if not found:
        return {}
    squares = sum(jnp.square(leaf.astype(jnp.float32)).sum() for leaf in found)
    return {"residual_norm": jnp.sqrt(squares / found[0].shape[0])}


def step_of(opt_state: Any) -> int:
    """`frozen_at` on the host, which waits for the devices; 0 where no warm-up has ended."""
    leaf = frozen_at(opt_state)
    return 0 if leaf is None else int(leaf)


def watched(step: Callable[..., tuple[Any, dict[str, Any]]]) -> Callable[..., Any]:
    """Adds to the metrics of a training step what the optimizer's state reports.

    The state's own buffer is gone when the next step starts. A metric is kept, and read with the
    others while the devices run the next step.

    Args:
      step: `(state, batch) -> (state, metrics)`, where `state.opt_state` is the optimizer's.

    Returns:
      A step of the same signature.
    """

    def watched_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        state, metrics = step(state, batch)
        leaf = frozen_at(state.opt_state)
        own = {} if leaf is None else {FIELD: leaf}
        return state, {**metrics, **own, **reported(state.opt_state)}

    return watched_step
