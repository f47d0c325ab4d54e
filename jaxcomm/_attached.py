"""Parameters whose gradients are exchanged where they are used, inside the backward pass.

How it works, for a stack of L layers that `jax.lax.scan` goes through:

1. `attach` of `jaxcomm.in_backward` puts the state of the exchange next to the parameters: every
   leaf of the stack becomes an `Attached`, whose arrays all have a leading axis of L. What slices
   the parameters, as a scan does, also slices the state.
2. `exchanged`, in the body of the loop, takes the parameters of one layer out again. It is the
   identity, except for its backward pass, which exchanges the gradient of the layer, and returns
   the finished update as the gradient of the parameters and the next state as that of the state. A
   loop stacks both, as it stacks every gradient.
3. A gradient has the dtype of what it is taken of, and integers have no gradient. So integers of
   the state are carried as float32 numbers of 16 bits each, which are exact.

The number of the layer is carried too, as keys are derived from it. Its gradient is 1, so that it
shows if a layer was not exchanged exactly once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcomm import _axes
from jaxcomm._axes import AxisName
from jaxcomm._cached_programs import refuse_cached_programs
from jaxcomm._order import tied, zero_of
from jaxcomm._unready import Unready

Arrays = list[jax.Array]
# What a device does in the backward pass: from the local gradients of a layer, its carried arrays
# and its parameters to finished updates and the next carried arrays.
OnLayer = Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """Layers whose gradients are exchanged in the backward pass.

    Attributes:
      axis_name: the axis of the exchange.
      paths: the paths of the leaves.
      layer: their shapes in one layer.
      carried: the number of axes and the dtype of each carried array of one layer.
      specs: how these are sharded, stacked, in the global view.
      on_layer: what a device does with the gradients of one layer.
      microbatches: the number of microbatches that the gradient of a step is the mean of.
    """

    axis_name: AxisName
    paths: tuple[str, ...]
    layer: tuple[tuple[int, ...], ...]
    carried: tuple[tuple[int, Any], ...]
    specs: tuple[PartitionSpec, ...]
    on_layer: OnLayer
    microbatches: int = 1


@jax.tree_util.register_pytree_node_class
class Attached(Unready):
    """A parameter that has to go through `exchanged` before anything computes with it.

    Attributes:
      value: the parameter, or its finished update.
      carried: for the first leaf of a stack, the state of the exchange; else empty.
      total: the sum of the gradients of earlier microbatches, float32; None if there are none.
      stack: the layers that it belongs to.
      number: which leaf of them it is.
      used: whether it went through `exchanged`.
    """

    stack: Stack
    number: int

    def __init__(self, value: Any, carried: Any, total: Any, stack: Stack, number: int) -> None:
        self.value, self.carried, self.total = value, carried, total
        self.stack, self.number = stack, number
        self.used = False

    def tree_flatten(self) -> tuple[tuple[Any, Any, Any], tuple[Stack, int]]:
        return (self.value, self.carried, self.total), (self.stack, self.number)

    @classmethod
    def tree_unflatten(cls, static: tuple[Stack, int], children: Any) -> "Attached":
        value, carried, total = children
        return cls(value, carried, total, *static)

    @property
    def path(self) -> str:
        """The path of the parameter."""
        return self.stack.paths[self.number]

    def _cure(self) -> str:
        return (
            f"parameter {self.path} is to be exchanged in the backward pass; begin the body of the "
            "loop with `layer = jaxcomm.exchanged(layer)`, and compute with what it returns."
        )


def is_attached(x: Any) -> bool:
    """Whether a node is a parameter that is exchanged in the backward pass."""
    return isinstance(x, Attached)


def attached_in(tree: Any) -> list[Attached]:
    """The attached parameters of a tree."""
    return list(filter(is_attached, jax.tree.leaves(tree, is_leaf=is_attached)))


def values_of(tree: Any) -> Any:
    """The tree with plain parameters, as they are."""
    return map_leaves(lambda x: x, lambda node: node.value, tree)


def detached(tree: Any) -> Any:
    """The tree with plain parameters, whose gradients are local and not exchanged."""
    return map_leaves(lambda x: x, lambda node: _as_local(node.value, node.stack), tree)


def last_of(tree: Any, totals: Any, microbatches: int) -> Any:
    """The tree for the last of several microbatches, from the sums of the others' gradients."""
    stacks: dict[int, Stack] = {}

    def of(node: Attached, total: jax.Array) -> Attached:
        new = dataclasses.replace(node.stack, microbatches=microbatches)
        stack = stacks.setdefault(id(node.stack), new)
        return Attached(node.value, node.carried, total, stack, node.number)

    return map_leaves(lambda x, total: x, of, tree, totals)


def nan_if_skipped(grads: Any, totals: Any) -> Any:
    """The gradients of the last microbatch, from which no layer may be missing.

    A layer that is missing was not exchanged, and the sums of the earlier microbatches would be
    lost. Its count becomes NaN on all devices, as for an update that is not finite.
    """
    lost: dict[int, list[jax.Array]] = {}

    def collect(node: Attached, total: jax.Array) -> None:
        is_lost = jnp.any(total.reshape(total.shape[0], -1) != 0, axis=1)
        lost.setdefault(id(node.stack), []).append(is_lost)

    map_leaves(lambda x, total: None, collect, grads, totals)

    def of(node: Attached) -> Attached:
        if not node.carried:
            return node
        count, *rest = node.carried
        names = _axes.names_of(node.stack.axis_name)
        of_leaves = jnp.any(jnp.stack(lost[id(node.stack)]), axis=0)
        is_lost = jax.lax.pmax((of_leaves & (count == 0)).astype(jnp.int32), names)
        count = jnp.where(is_lost == 1, jnp.nan, count)
        return Attached(node.value, (count, *rest), node.total, node.stack, node.number)

    return map_leaves(lambda x: x, of, grads)


def finished(node: Attached, of: Attached) -> Attached:
    """The update that the last microbatch ends with, in the place of its parameter."""
    return Attached(node.value, node.carried, None, of.stack, of.number)


def specs_of(node: Attached) -> Attached:
    """How an attached parameter is sharded over the axis of the exchange, in the global view."""
    specs = node.stack.specs if node.carried else ()
    return Attached(PartitionSpec(), specs, node.total, node.stack, node.number)


def with_attached(tree: Any, of: Any) -> Any:
    """The tree, with the attached parameters of another one."""
    return map_leaves(lambda x, _: x, lambda _, node: node, tree, of)


def after_exchanges(grads: Any, tree: Any) -> Any:
    """The tree; on CPUs, nothing can be sent of it before the exchanges in the backward pass.

    XLA on CPU does not keep the order of collectives in a loop among those that need nothing of it,
    so one device may wait in the loop of the layers while another one waits outside of it.

    Args:
      grads: gradients of one device, with what was exchanged in the backward pass.
      tree: arrays that are sent later.
    """
    counts = [node.carried[0] for node in attached_in(grads) if node.carried]
    if not counts or _axes.platform() != "cpu":
        return tree
    zero = functools.reduce(jnp.maximum, map(zero_of, counts))
    return jax.tree.map(functools.partial(tied, zero=zero), tree)


def map_leaves(
    plain: Callable[..., Any], attached: Callable[..., Any], tree: Any, *rest: Any
) -> Any:
    """Like `jax.tree.map`, with a function for each kind of leaf."""

    def of(x: Any, *others: Any) -> Any:
        return (attached if is_attached(x) else plain)(x, *others)

    return jax.tree.map(of, tree, *rest, is_leaf=is_attached)


def exchanged(layer: Any) -> Any:
    """The parameters of one layer, whose gradient is exchanged inside the backward pass.

    Call it once for each layer, at the start of the body of `jax.lax.scan`, `nnx.scan` or a Python
    loop, inside or outside `jax.checkpoint`, and compute with what it returns. Then a layer's
    gradient is sent while the gradients of the layers before it are computed; after the loop, no
    computation would be left to hide it. If a parameter is used several times through the result of
    one call, its gradients are summed first, and it is exchanged once. It is also exchanged only
    once if the layer is recomputed.

    Args:
      layer: the pytree of one layer's parameters, from what `attach` of `jaxcomm.in_backward`
        returned. Parameters that are not attached are returned unchanged, so that the same code
        can evaluate a model.

    Returns:
      The same parameters, as plain arrays.

    Raises:
      ValueError: for a part of a layer, for layers that are still stacked, or for parameters that
        were changed before: cast them after this call.

    Wire: in the backward pass, that of the exchange that was passed to `jaxcomm.in_backward`.

    Example:
      A loss that scans its layers; with plain parameters it can be evaluated anywhere:

      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> def loss_fn(params, x):
      ...     def block(x, layer):
      ...         layer = jaxcomm.exchanged(layer)
      ...         return x @ layer["w"], None
      ...     return jax.lax.scan(block, x, params["blocks"])[0].mean()
      >>> exchange = jaxcomm.in_backward(jaxcomm.mean("data"), ["blocks"])
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     params = {"blocks": {"w": jnp.stack([jnp.eye(2)] * 3)}}
      ...     attached, x = exchange.attach(params, exchange.init(params)), jnp.ones((2, 2))
      ...     _, grads = jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))(attached, x)
      >>> loss_fn(params, x).item()
      1.0
    """
    leaves, treedef = jax.tree.flatten(layer, is_leaf=is_attached)
    nodes = sorted(filter(is_attached, leaves), key=lambda node: node.number)
    if not nodes:
        return layer
    refuse_cached_programs("jaxcomm.exchanged exchanges in loops")
    stack = _stack_of(nodes)
    for node in nodes:
        node.used = True
    values = [node.value for node in nodes]
    carried, totals = list(nodes[0].carried), [node.total for node in nodes]
    whole = dict(zip(map(id, nodes), _identity(stack)(values, carried, totals), strict=True))
    return treedef.unflatten([whole[id(x)] if is_attached(x) else x for x in leaves])


def _identity(stack: Stack) -> Callable[[Arrays, Arrays, list[Any]], Arrays]:
    """The parameters of a layer, from these and what is carried."""

    def plain(values: Arrays) -> Arrays:
        return [_as_local(x, stack) for x in values]

    @jax.custom_vjp
    def identity(values: Arrays, carried: Arrays, totals: list[Any]) -> Arrays:
        del carried, totals
        return plain(values)

    def forward(values: Arrays, carried: Arrays, totals: list[Any]) -> tuple[Arrays, Any]:
        return plain(values), (values, carried, totals)

    def backward(saved: Any, grads: Arrays) -> tuple[Arrays, Arrays, list[Any]]:
        values, carried, totals = saved
        means = [_mean_of(g, t, stack.microbatches) for g, t in zip(grads, totals, strict=True)]
        updates, carried = stack.on_layer(means, carried, values)
        return updates, carried, jax.tree.map(jnp.zeros_like, totals)

    identity.defvjp(forward, backward)
    return identity


def _as_local(value: Any, stack: Stack) -> Any:
    """A parameter, typed as each device's own, so that its gradient is not summed."""
    if not _axes.is_manual(stack.axis_name):
        raise ValueError(
            f"parameter {stack.paths[0]} is exchanged where its gradient is each device's own: "
            f"take gradients by jaxcomm.value_and_grad(loss_fn, {stack.axis_name!r}), or inside "
            "jax.shard_map. To evaluate the loss, use parameters that are not attached."
        )
    if not _axes.checks_on(stack.axis_name):
        return value
    return _axes.as_varying(value, frozenset(_axes.names_of(stack.axis_name)))


def _mean_of(grad: jax.Array, total: jax.Array | None, microbatches: int) -> jax.Array:
    """The mean gradient of all microbatches, from that of the last one."""
    if total is None:
        return grad
    return ((total + grad.astype(jnp.float32)) / microbatches).astype(grad.dtype)


def _stack_of(nodes: Sequence[Attached]) -> Stack:
    """The stack that the leaves of one layer belong to, checked."""
    stack: Stack = nodes[0].stack
    found = {node.path for node in nodes if node.stack is stack}
    if lacking := [path for path in stack.paths if path not in found]:
        raise ValueError(
            f"jaxcomm.exchanged was given a layer without parameter {lacking[0]}; give it all "
            "parameters of a layer at once, as they were attached."
        )
    if len(nodes) > len(found):
        raise ValueError(
            f"jaxcomm.exchanged was given {len(nodes)} parameters, and the layer of "
            f"{stack.paths[0]} has {len(found)}; give it one layer at a time."
        )
    for node, shape in zip(nodes, stack.layer, strict=True):
        if jnp.shape(node.value) != shape:
            raise ValueError(
                f"parameter {node.path} has shape {jnp.shape(node.value)} in jaxcomm.exchanged, "
                f"but in one layer it is {shape}; call it inside the loop, on one layer."
            )
    if any(node.used for node in nodes):
        raise ValueError(
            f"the layer of {stack.paths[0]} went through jaxcomm.exchanged already; call it once, "
            "and use its result several times: then the sum of the gradients is exchanged."
        )
    kinds = [(jnp.ndim(x), jnp.result_type(x)) for x in nodes[0].carried]
    if kinds != list(stack.carried):
        raise ValueError(
            f"the state of the exchange of {stack.paths[0]} was changed together with the "
            "parameters; cast and scale parameters after jaxcomm.exchanged, not before it."
        )
    return stack


def to_floats(tree: Any) -> Arrays:
    """The arrays of a state as float arrays, whose dtypes gradients can have."""
    return [_to_float(x) for x in jax.tree.leaves(tree)]


def from_floats(arrays: Sequence[jax.Array], like: Any) -> Any:
    """The reverse of `to_floats`, with the structure and the dtypes of another state."""
    leaves, treedef = jax.tree.flatten(like)
    pairs = zip(arrays, leaves, strict=True)
    return treedef.unflatten([_from_float(x, leaf) for x, leaf in pairs])


def _to_float(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype.itemsize > 2:
        x = jax.lax.bitcast_convert_type(x, jnp.uint16)
    return x.astype(jnp.float32)


def _from_float(x: jax.Array, like: Any) -> jax.Array:
    if jnp.issubdtype(like.dtype, jnp.floating):
        return x
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.uint16), jnp.uint32)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(like))
    if like.dtype.itemsize <= 2:
        return x.astype(like.dtype)
    return jax.lax.bitcast_convert_type(x.astype(jnp.uint16), like.dtype)
