"""Stacked layers for `jax.lax.scan`: leaves whose leading axis counts layers."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from jaxcomm import _paths
from jaxcomm._context import holding
from jaxcomm.transforms._buckets import LAYER
from jaxcomm.transforms._layout import PATHS, STACKED
from jaxcomm.transforms._options import check_patterns, fits, require_strings
from jaxcomm.transforms._wrappers import with_extra_args


def with_layer_axis(
    tx: optax.GradientTransformation, layers: Sequence[str]
) -> optax.GradientTransformationExtraArgs:
    """Declares that the leading axis of some leaves counts layers, as `jax.lax.scan` needs it.

    A stack of biases or norms is then exempt, like a single one, and `jaxcomm.low_rank_mean` and
    `jaxcomm.factored_adam` treat a stack of kernels as one matrix per layer. Without it, stacks of
    biases and norms are recognised only by their usual names ("bias", "scale", "offset", "beta",
    "gamma", "norm1/weight").

    Args:
      tx: a transformation, usually the whole chain.
      layers: patterns of paths, as in `fnmatch`, such as ["blocks/*"].

    Returns:
      A transformation used like `tx`.

    Raises:
      TypeError: immediately for a string in place of a list.
      ValueError: by `init`, for a pattern that fits no parameter, or fits one without axes.

    Wire: that of `tx`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.with_layer_axis(jaxcomm.mean("data", "int8"), ["blocks/*"])
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     state = tx.init({"blocks": {"w": jnp.zeros((12, 8, 8)), "b": jnp.zeros((12, 8))}})
      >>> [leaf.path for leaf in state.layout.leaves if leaf.exempt]
      ['blocks/b']
    """
    require_strings(layers, "layers", "patterns")
    tx = with_extra_args(tx, "with_layer_axis", "tx")

    def init_fn(params: Any) -> Any:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        shapes = {_paths.path_name(path): jax.numpy.shape(leaf) for path, leaf in leaves}
        paths = PATHS.get() or tuple(shapes)  # inside `in_backward`, of all its parts
        is_layer = LAYER.get() is not None  # of `in_backward`, which has no such axis
        check_patterns(layers, paths, "with_layer_axis")
        for pattern in () if is_layer else layers:
            found = [path for path in paths if fits(path, [pattern])]
            if scalars := [path for path in found if shapes.get(path) == ()]:
                raise ValueError(
                    f"with_layer_axis names {pattern!r}, and parameter {scalars[0]} has no axis "
                    "that could count layers; name only leaves that are stacked."
                )
        with holding(STACKED, () if is_layer else tuple(layers)):
            return tx.init(params)

    return optax.GradientTransformationExtraArgs(init_fn, tx.update)
