"""What `init` records about the parameters, and `update` checks gradients against."""

import contextvars
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxcomm import _axes, _nnx, _paths, _placing
from jaxcomm._axes import AxisName, names_in_entry
from jaxcomm._marks import axes_of, marked_dtype
from jaxcomm.transforms import _roles, _specs
from jaxcomm.transforms._options import Exempt, check_order, check_patterns, fits
from jaxcomm.transforms._specs import names_in

# Patterns of paths of leaves whose leading axis counts layers.
STACKED: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("stacked")
# All paths that patterns may name, where `init` is given a part of the parameters.
PATHS: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("paths", default=())
# What frameworks call a leaf with one number for each feature: a bias, or the scale of a norm.
# Stacked for a scan over layers, or shaped (heads, head width), it still has several dimensions.
VECTORS = ("bias", "scale", "offset", "beta", "gamma")
# The last two names of a norm's weight: "layers/0/input_layernorm/weight", "h/0/ln_1/weight".
_NORMS = re.compile(r"(.*norm(_?\d+)?|ln([\d_].*)?)/weight", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter.

    Attributes:
      path: its path in the tree, such as "layers/0/kernel".
      shape: its global shape.
      dtype: its dtype.
      spec: how it is sharded over the axes other than the exchange's axis.
      exempt: whether it travels in float32.
      stacked: whether its leading axis counts layers.
      varying: where `init` ran device by device along further axes, those over which the parameter
        differs, and which are not in `spec`. A state that was made outside compares equal.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    exempt: bool = False
    stacked: bool = False
    varying: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """The leaves of the parameters, and the axis of the exchange.

    A layout is static: it belongs to the structure of a state, so there is nothing to shard, save
    or donate.

    Attributes:
      axis_name: the mesh axis.
      world: the number of devices along it.
      leaves: the parameters.
      buckets: which leaves travel together, where a state keeps thresholds for each bucket.
    """

    axis_name: AxisName
    world: int
    leaves: tuple[Leaf, ...]
    buckets: tuple[tuple[int, ...], ...] = ()


def layout_of(
    params: Any,
    axis_name: AxisName,
    exempt: Exempt = (),
    bucket_order: Sequence[str] | None = None,
    settings: Any = None,
    spec_of: Callable[[Any, str, AxisName], PartitionSpec] | None = None,
) -> Layout:
    """Reads the layout off parameters, in either view.

    Args:
      params: the parameters.
      axis_name: the axis of the exchange.
      exempt: patterns of paths, as in `fnmatch`, of leaves that travel in float32, in addition to
        leaves of at most one dimension, an axis of layers not counted, and to those with the usual
        names of biases and norms; or a function of path and shape that decides about all.
      bucket_order: paths of leaves, to be checked.
      settings: what else must be equal in all processes.
      spec_of: a function from a leaf, its path and the axis to its spec; None looks at the leaf,
        and refuses one that is sharded over the axis.

    Raises:
      TypeError: for leaves that are not float32, bfloat16 or float16.
      ValueError: if no mesh is set, it has no such axis, a leaf is sharded over the axis, its
        sharding cannot be seen here, a pattern fits no path, or there are no parameters; if they
        differ between processes.
    """
    world = _axes.axis_size(axis_name)
    nodes = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    if isinstance(params, optax.LookaheadParams):
        raise ValueError(
            "optax.lookahead keeps two copies of the parameters, and an exchange before it in a "
            "chain would treat both as the model's. Put the chain inside it: "
            "optax.lookahead(optax.chain(jaxcomm.mean(...), optimizer), ...)."
        )
    if type(params).__name__ == "_ParamsPlaceholder":  # of optax; it is not public
        raise ValueError(
            "optax.tree.map_params(tx, f, state) makes a state without parameters, but the state "
            "of an exchange has their shapes. In optax.chain(exchange, optimizer), map over the "
            "optimizer's own state: optax.tree.map_params(optimizer, f, state[1]). For shardings "
            "of a whole state there is jaxcomm.state_spec; for the rest, jax.tree.map."
        )
    if not nodes:
        raise ValueError(
            f"there are no parameters in {params!r}, so there is nothing to exchange; pass the "
            "pytree of parameters that is differentiated."
        )
    _paths.require_arrays(params, "parameter")
    _nnx.refuse_shared(params)
    named = [(_paths.path_name(p), x) for p, x in jax.tree_util.tree_leaves_with_path(params)]
    _paths.require_distinct([name for name, _ in named])
    patterns = () if callable(exempt) else sorted(exempt)  # sets differ between processes
    kinds = [(name, jnp.shape(x), fits(name, STACKED.get(()))) for name, x in named]
    alone = {name: is_exempt(name, shape, stacked, exempt) for name, shape, stacked in kinds}
    stacks = [name for name, _, stacked in kinds if stacked]
    _placing.note_settings((axis_name, patterns, bucket_order, settings, alone, stacks))
    _placing.require_equal_everywhere([name for name, _ in named], [x for _, x in named])
    leaves = []
    varying = _specs.varying_in(named, axis_name)
    for (name, leaf), (_, shape, stacked), axes in zip(named, kinds, varying, strict=True):
        dtype = jnp.result_type(leaf)
        _paths.require_float(name, dtype)
        spec = (spec_of or _specs.spec_of)(leaf, name, axis_name)
        leaves.append(Leaf(name, tuple(shape), dtype, spec, alone[name], stacked, axes))
    known = PATHS.get() or [leaf.path for leaf in leaves]
    is_part = any(isinstance(node, optax.MaskedNode) for node in nodes) and not PATHS.get()
    if not callable(exempt):
        check_patterns(exempt, known, is_part=is_part)
    check_order(bucket_order or (), known, is_part)
    return Layout(axis_name, world, tuple(leaves))


def is_exempt(path: str, shape: tuple[int, ...], stacked: bool, exempt: Exempt) -> bool:
    """Whether a leaf travels in float32; see `layout_of`."""
    if callable(exempt):
        decided = exempt(path, shape[stacked:])
        if not isinstance(decided, bool | np.bool_):
            raise TypeError(f"exempt must return True or False, got {decided!r} for {path}.")
        return bool(decided)
    return is_vector(path, shape, stacked) or fits(path, exempt)


def is_vector(path: str, shape: tuple[int, ...], stacked: bool) -> bool:
    """Whether a leaf has one number for each feature: a bias, or the scale of a norm."""
    *_, name = last_two = path.split("/")[-2:]
    is_named_so = name in VECTORS or _NORMS.fullmatch("/".join(last_two)) is not None
    return len(shape) - stacked <= 1 or is_named_so


def filled_leaves(layout: Layout) -> list[int]:
    """The indices of leaves that have elements; XLA does not keep empty ones sharded."""
    return [i for i, leaf in enumerate(layout.leaves) if 0 not in leaf.shape]


def local_shape(leaf: Leaf) -> tuple[int, ...]:
    """The shape of a leaf on one device, where `on_every_device` runs."""
    shards = [math.prod(_axes.axis_size(name) for name in names_in_entry(e)) for e in leaf.spec]
    sizes = zip(leaf.shape, (*shards, *[1] * (len(leaf.shape) - len(shards))), strict=True)
    return tuple(n // k for n, k in sizes)


def axis_of(state: Any, who: str) -> AxisName:
    """The one axis over which the transformations of a state exchange; `who` is for messages.

    Raises:
      ValueError: if there is none, or more than one.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Layout))
    given = [node.axis_name for node in nodes if isinstance(node, Layout)]
    axes = {_axes.names_of(name): name for name in given if _roles.exchanges(state)}
    if len(axes) > 1:
        raise ValueError(
            f"{who} needs inner transformations that exchange over one axis, found "
            f"{' and '.join(sorted(map(repr, axes.values())))}; name the same axis in all of them."
        )
    if not axes:
        raise ValueError(
            f"{who} needs inner transformations that exchange, found none; put jaxcomm.mean inside "
            f"it{', or use optax.MultiSteps' if who == 'multi_steps' else ''}."
        )
    return given[0]


def leaf_paths(state: Any) -> set[str]:
    """The paths of the parameters that the transformations of a state cover."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Layout))
    return {leaf.path for node in nodes if isinstance(node, Layout) for leaf in node.leaves}


def check_gradients(grads: list[Any], layout: Layout) -> None:
    """Raises unless these are the local gradients of the layout's parameters.

    Raises:
      ValueError: for another number of leaves or devices, other shapes, or gradients that are not
        local: over another axis, already summed, or without the leading device axis.
    """
    axis = layout.axis_name
    for over in filter(None, map(axes_of, grads)):
        if over != _axes.names_of(axis):  # in another order, gradients would move before
            over = over[0] if len(over) == 1 else over
            raise ValueError(
                f"these gradients are local over {over!r}, and the transformation is over "
                f"{axis!r}; name the axis of jaxcomm.value_and_grad(loss_fn, {over!r}) in both."
            )
    if len(grads) != len(layout.leaves):
        raise ValueError(
            f"the state was made for {len(layout.leaves)} parameters and got {len(grads)} "
            "gradients; call tx.init again on these parameters. Labels and masks that are "
            "functions also see gradients, which have a leading device axis: give their results, "
            "label_fn(params)."
        )
    if layout.world != _axes.axis_size(axis):
        raise ValueError(
            f"the state was made for {layout.world} devices along {axis!r}, and the mesh now has "
            f"{_axes.axis_size(axis)}; jaxcomm.resize_state(tx, state, params) converts it."
        )
    manual = _axes.is_manual(axis)
    for grad, leaf in zip(grads, layout.leaves, strict=True):
        if manual:
            _check_local(grad, leaf, axis)
        elif names_in(leaf.spec) & _axes.manual_axes():
            raise ValueError(
                f"this is inside a jax.shard_map over an axis that splits {leaf.path}, but not "
                f"over {axis!r}; make it over {axis!r} too, or call tx.update outside of it."
            )
        elif grad.shape != (layout.world, *leaf.shape):
            if marked_dtype(grad) is not None and grad.shape[:1] == (layout.world,):
                raise ValueError(
                    f"the state was made for {leaf.path} of shape {leaf.shape}, but this gradient "
                    f"has shape {grad.shape[1:]}; call tx.init(params) on these parameters."
                )
            raise ValueError(
                f"the gradient of {leaf.path} has shape {grad.shape}, expected "
                f"{(layout.world, *leaf.shape)}: one for each device along {axis!r}. "
                f"Make it with jaxcomm.value_and_grad(loss_fn, {axis!r}): a gradient by jax.grad "
                "is already averaged over the devices, and so is one that another transformation "
                "before this one has exchanged. Exchange once in a chain."
            )


def check_paths(grads: Any, layout: Layout) -> None:
    """Raises a ValueError for gradients of parameters with other names, in another order or new.

    States keep what belongs to a parameter by its number. A list of leaves has no names.
    """
    found = [_paths.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
    for name, leaf in zip(found, layout.leaves, strict=True):
        if are_other_names(name, leaf.path):
            raise ValueError(
                f"the state was made for a parameter {leaf.path!r} where this gradient is of "
                f"{name!r}; call tx.init again, on these parameters."
            )


def are_other_names(a: str, b: str) -> bool:
    """Whether two paths differ, and both are more than numbers."""
    return a != b and not any(path.replace("/", "").isdigit() or not path for path in (a, b))


def _check_local(grad: Any, leaf: Leaf, axis: AxisName) -> None:
    if _axes.checks_on(axis) and not _axes.varies(grad, axis):
        raise ValueError(
            f"the gradient of {leaf.path} is equal on all devices of {axis!r}: it is already "
            f"summed. Exchange once in a chain. Make the gradient with "
            f"jaxcomm.value_and_grad(loss_fn, {axis!r}), or cast the parameters with "
            f'jax.lax.pcast(params, {axis!r}, to="varying") first.'
        )
    if not _axes.checks_on(axis) and marked_dtype(grad) is None:
        raise ValueError(
            f"the gradient of {leaf.path} may be exchanged already: with check_vma=False types "
            f"cannot tell. Exchange once in a chain. Make the gradient with "
            f"jaxcomm.value_and_grad(loss_fn, {axis!r}), or, if it is this device's own, give "
            "tx.update what jaxcomm.mark_local(grads) returns."
        )
    if leaf.spec == PartitionSpec() and grad.shape != leaf.shape:
        raise ValueError(
            f"the gradient of {leaf.path} has shape {grad.shape}, expected {leaf.shape}; "
            "inside jax.shard_map gradients have the shapes of their parameters."
        )


def split_over(leaf: Leaf) -> frozenset[str]:
    """The axes of several devices over which a leaf is known to differ."""
    names = names_in(leaf.spec).union(leaf.varying)
    return frozenset(name for name in names if _axes.axis_size(name) > 1)
