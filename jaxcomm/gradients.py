"""Local gradients: of one batch, of its microbatches, and the order in which they appear."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcomm import _axes, _paths, _shards
from jaxcomm._attached import (
    after_exchanges,
    attached_in,
    map_leaves,
    specs_of,
    values_of,
    with_attached,
)
from jaxcomm._aux import Aux, mean_over, with_same
from jaxcomm._axes import AxisName
from jaxcomm._batches import check_rows, refuse_unplaced, shares_of
from jaxcomm._jaxprs import position_of
from jaxcomm._losses import (
    already_reduced,
    bound,
    check_loss,
    loss_and_aux,
    over_devices,
    passed_whole,
    refuse_refs,
    refuse_rows,
    saying_where,
    stacked,
    warn_of_rows,
)
from jaxcomm._marks import (
    FINISHED,
    GRADIENT,
    OWN_GRADIENT,
    OWN_PARAMETER,
    axes_of,
    kind_of,
    mark,
    unmark_local,
)
from jaxcomm._microbatches import accumulated
from jaxcomm._nnx import refuse_shared, refuse_statistics
from jaxcomm._numbers import is_integer

_NONE: Any = object()  # no batch was given


@dataclasses.dataclass(frozen=True)
class ValueAndGrad:
    """What `value_and_grad` returns; `accumulate` returns a copy that runs in microbatches."""

    loss_fn: Callable[..., Any]
    axis_name: AxisName
    has_aux: bool
    microbatches: int = 1

    def __call__(
        self, params: Any, batch: Any = _NONE, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """The mean loss over devices, and local gradients."""
        if batch is _NONE:
            raise TypeError(
                "the batch is missing: call jaxcomm.value_and_grad(loss_fn, axis)(params, batch), "
                "with loss_fn(params, batch). Each device is given its rows of the batch; "
                "values that loss_fn closes over are passed in full to all devices."
            )
        unsplit: list[str] = []
        if not _axes.is_manual(self.axis_name):
            world = _axes.axis_size(self.axis_name)
            unsplit = warn_of_rows(self.loss_fn, batch, args, kwargs, world)
            refuse_refs((args, kwargs))
        loss_fn, arrays = bound(self.loss_fn, args, kwargs)
        try:
            return dataclasses.replace(self, loss_fn=loss_fn)._of(params, batch, *arrays)
        except Exception as error:  # perhaps because of what was warned of
            for text in unsplit:
                error.add_note(f"jaxcomm.value_and_grad: {text}")
            raise

    def _of(self, params: Any, batch: Any, *args: Any) -> tuple[Any, Any]:
        """`__call__`, where all further arguments are arrays."""
        world = _axes.axis_size(self.axis_name)
        _require_rows(batch)
        refuse_statistics(params)  # first: its message for a counter says more than its dtype
        refuse_shared(params)
        kinds = {kind_of(leaf) for leaf in jax.tree.leaves(params)}
        for over in filter(None, map(axes_of, jax.tree.leaves(params))):
            if over != _axes.names_of(self.axis_name):
                raise ValueError(
                    f"these parameters are each device's own over {', '.join(over)}, and gradients "
                    f"are taken over {self.axis_name!r}; name the axis of the exchange in both."
                )
        if kinds - {None, OWN_PARAMETER}:
            raise TypeError(
                "got gradients as parameters; write value_and_grad(f, axis)(params, batch)."
            )
        own, params = OWN_PARAMETER in kinds, unmark_local(params)
        _require_floats(params)
        self._check_attached(params)
        kind = OWN_GRADIENT if own else GRADIENT
        # Random codecs gather parameters that are split anew for every microbatch.
        vary = own or (self.microbatches > 1 and bool(_shards.state_of(params)))
        how = self.has_aux, self.axis_name, self.microbatches, vary
        if _axes.is_manual(self.axis_name):
            check_loss(self.loss_fn, values_of(params), batch, args, *how)
            value, grads = self._on_one_device((), params, batch, *args)  # all may differ
            return value, _marked(grads, kind, self.axis_name)
        shares = shares_of(batch, world, self.axis_name)
        refuse_unplaced(batch, self.axis_name)
        check_rows(batch)
        of_one = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x)), params
        )
        whole = of_one if own else _shards.whole(values_of(params))
        same = check_loss(self.loss_fn, whole, shares, args, *how)
        replicated, split = PartitionSpec(), PartitionSpec(self.axis_name)
        attached_specs = map_leaves(lambda x: x, specs_of, params)
        if _axes.explicit_axes().issuperset(_axes.names_of(self.axis_name)):
            batch = jax.tree.map(lambda x: _spread(x, self.axis_name), batch)
        args = tuple(passed_whole(x, self.axis_name) for x in args)
        # Checks would refuse models that scan from zeros; what varies over other axes needs them.
        value, grads = jax.shard_map(
            lambda params, *inputs: _with_device_axis(
                self._on_one_device(
                    same, _first(params) if own else _shards.entering(params), *inputs
                )
            ),
            in_specs=(
                split
                if own
                else with_attached(_shards.in_specs(params, replicated), attached_specs),
                split,
                *[replicated] * len(args),
            ),
            out_specs=(
                replicated,
                with_attached(_shards.out_specs(params, split), attached_specs),
            ),
            axis_names=set(_axes.names_of(self.axis_name)),
            check_vma=any(map(_axes.varying_axes, jax.tree.leaves((params, batch, args)))),
        )(params, batch, *args)
        # Not inside the region: at its border an opaque dtype would be gathered over other axes.
        return value, _marked(grads, kind, self.axis_name)

    def _check_attached(self, params: Any) -> None:
        """Raises if the exchange inside the backward pass is over another axis."""
        for node in attached_in(params):
            if _axes.names_of(node.stack.axis_name) != _axes.names_of(self.axis_name):
                raise ValueError(
                    f"parameter {node.path} is exchanged over {node.stack.axis_name!r} in the "
                    f"backward pass, but gradients are taken over {self.axis_name!r}; name the "
                    "same axis in both."
                )

    def _on_one_device(
        self, same: Collection[int], params: Any, batch: Any, *args: Any
    ) -> tuple[Any, Any]:
        if _axes.checks_on(self.axis_name):
            axes = frozenset(_axes.names_of(self.axis_name))
            params = map_leaves(lambda p: _axes.as_varying(p, axes), lambda node: node, params)
        loss = functools.partial(self._checked_loss, same)
        differentiate = jax.value_and_grad(loss, has_aux=True)
        value, grads = accumulate(differentiate, self.microbatches)(params, batch, *args)
        grads = map_leaves(functools.partial(after_exchanges, grads), lambda node: node, grads)
        value, aux = mean_over(value, self.axis_name, grads)
        return ((value, aux) if self.has_aux else value), grads

    def _checked_loss(
        self, same: Collection[int], params: Any, batch: Any, *args: Any
    ) -> tuple[jax.Array, Aux]:
        with saying_where(self.axis_name):
            out = self.loss_fn(params, batch, *args)
        loss, aux = loss_and_aux(out, self.has_aux)
        marked = with_same(aux, same, self.axis_name, self.microbatches)
        if _axes.axis_size(self.axis_name) > 1:
            aux_of = functools.partial(self._aux, params, args=args)
            refuse_rows(aux, marked, aux_of, batch, self.axis_name)
        on = _axes.checks_on(self.axis_name)
        if on and not _axes.varies(loss, self.axis_name):
            raise ValueError(already_reduced(self.axis_name))
        return loss, marked

    def _aux(self, params: Any, batch: Any, args: tuple[Any, ...]) -> Any:
        return loss_and_aux(self.loss_fn(params, batch, *args), self.has_aux)[1]


def value_and_grad(
    loss_fn: Callable[..., Any], axis_name: AxisName, *, has_aux: bool = False
) -> ValueAndGrad:
    """Like `jax.value_and_grad`, but each device keeps the gradient of its own share of the batch.

    Under plain `jax.jit` with a mesh set, the batch is global and sharded over the axis, and the
    gradients have a leading device axis. This costs no memory: each device holds only its own.
    Inside `jax.shard_map`, batch and gradients are local. Gradients have an opaque dtype, so that
    nothing can use them before they are exchanged; `jaxcomm.unmark_local` returns their values.

    Args:
      loss_fn: `loss_fn(params, batch, *args, **kwargs)` returns the mean loss over the examples it
        is given, with `has_aux` also auxiliary values. It receives one device's share. The axis
        name is bound inside it, so `jax.lax.axis_index(axis_name)` and, for synchronised batch
        norm, `jax.lax.pmean` work.
      axis_name: the mesh axis, or axes, over which the batch is spread.
      has_aux: whether `loss_fn` returns `(loss, aux)`.

    Returns:
      `f(params, batch, *args, **kwargs)`, which returns `(loss, grads)` or `((loss, aux), grads)`.
      `params` are shared, or each device's own from `jaxcomm.local_params`. Loss and aux are means
      over the devices, equal on all of them. Aux that all devices have in common by construction,
      such as counters, seeds and results of `jax.lax.psum`, comes back as it is; other integers
      become float32, which rounds those above 2^24, and float64 values keep only float32 precision.
      Microbatches average a result of `psum`. Inside `jax.shard_map`, all aux is averaged without
      its checks and with microbatches. The leaves of `batch` have a common leading axis of
      examples. All further arguments are passed to every device unchanged,
      including those that are not arrays, such as `train=True`. So a dropout key among them is the
      same on all devices, and so would be the masks: begin `loss_fn` with
      `key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))`.

    Raises:
      ValueError: when called, if no mesh is set, the batch is empty, does not divide over the
        devices or belongs to one process only, the loss was already averaged over the axis or does
        not depend on the batch, aux has one row per example, a Flax NNX model has shared variables,
        or the loss changes variables of one, whose new values would be lost.
      TypeError: immediately, if `loss_fn` is not a function; when called, if aux is not made of
        real numbers, `loss_fn` does not return what `has_aux` requires, or a parameter is neither
        float32, bfloat16 nor float16; also if the gradients are differentiated again.

    Wire: one float32 all-reduce of the loss and the aux that is averaged.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> def loss_fn(w, batch):
      ...     return jnp.mean(w * batch)
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     f = jaxcomm.value_and_grad(loss_fn, "data")
      ...     loss, grads = jax.jit(f)(jnp.float32(2), jnp.array([1.0, 2.0, 3.0, 4.0]))
      >>> loss, jaxcomm.unmark_local(grads)
      (Array(5., dtype=float32), Array([1.5, 3.5], dtype=float32))
    """
    _axes.names_of(axis_name)
    if not callable(loss_fn):
        raise TypeError(f"value_and_grad takes a function, got {loss_fn!r}.")
    return ValueAndGrad(loss_fn, axis_name, has_aux)


@overload
def accumulate(value_and_grad_fn: ValueAndGrad, microbatches: int) -> ValueAndGrad: ...
@overload
def accumulate(value_and_grad_fn: Callable[..., Any], microbatches: int) -> Callable[..., Any]: ...
def accumulate(value_and_grad_fn: Callable[..., Any], microbatches: int) -> Callable[..., Any]:
    """Processes a batch in microbatches, using the memory of one.

    Args:
      value_and_grad_fn: what `jaxcomm.value_and_grad` or, inside `jax.shard_map`,
        `jax.value_and_grad` returned.
      microbatches: their number; it must divide each device's share of the batch.

    Returns:
      A function with the arguments of `value_and_grad_fn`: loss, aux and gradients are means over
      the microbatches, accumulated in float32. Further arguments are passed unchanged to every
      microbatch. For dropout that differs between microbatches, make the indices of the examples a
      leaf of the batch, and fold the first one into the key.

    Raises:
      ValueError: if `microbatches` is not a positive integer; when called, if the batch does not
        divide.
      TypeError: if `value_and_grad_fn` is not a function; when called, if it does not return a loss
        and gradients.

    Wire: that of `value_and_grad_fn`, once for all microbatches of `jaxcomm.value_and_grad`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> f = jaxcomm.value_and_grad(lambda w, x: jnp.mean(x * w), "data")
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     batch = jaxcomm.global_batch(jnp.arange(4.0), "data")
      ...     loss, grads = jax.jit(jaxcomm.accumulate(f, 2))(jnp.float32(1), batch)
      >>> float(loss), jaxcomm.unmark_local(grads).tolist()
      (1.5, [0.5, 2.5])
    """
    if not is_integer(microbatches) or microbatches < 1:
        raise ValueError(
            f"accumulate needs a positive number of microbatches, got {microbatches!r}."
        )
    if not callable(value_and_grad_fn):
        raise TypeError(f"accumulate takes a function, got {value_and_grad_fn!r}.")
    if isinstance(value_and_grad_fn, ValueAndGrad):
        return dataclasses.replace(
            value_and_grad_fn, microbatches=value_and_grad_fn.microbatches * microbatches
        )
    if microbatches == 1:
        return value_and_grad_fn

    return accumulated(value_and_grad_fn, microbatches)


def backward_order(
    f: ValueAndGrad, params: Any, batch: Any, *args: Any, **kwargs: Any
) -> tuple[str, ...]:
    """The paths of the parameters in the order in which their gradients appear.

    Args:
      f: what `jaxcomm.value_and_grad` returned; it is traced as under plain `jax.jit`, not run.
      params: the parameters, as arrays or `jax.ShapeDtypeStruct`s.
      batch: the global batch, likewise.
      *args: the further arguments, likewise.
      **kwargs: likewise.

    Returns:
      Paths such as "layers/0/kernel", for the `bucket_order` of `jaxcomm.mean`.

    Raises:
      TypeError: if `f` is anything else, and for parameters that are not float arrays.
      ValueError: for a batch without rows.

    Wire: nothing.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> f = jaxcomm.value_and_grad(lambda p, x: jnp.mean(jnp.tanh(x @ p["a"]) @ p["b"]), "data")
      >>> params = {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 1))}
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     jaxcomm.backward_order(f, params, jnp.ones((2, 2)))
      ('b', 'a')
    """
    if not isinstance(f, ValueAndGrad):
        raise TypeError(f"backward_order takes what jaxcomm.value_and_grad returned, got {f!r}.")
    _require_rows(batch)
    _require_floats(params)
    shares = shares_of(batch, _axes.axis_size(f.axis_name), f.axis_name)
    paths = [_paths.path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]

    loss_fn, arrays = bound(f.loss_fn, args, kwargs)

    def grad(inputs: tuple[Any, list[Any]], batch: Any) -> Any:
        params, arrays = inputs
        grads = jax.grad(loss_fn, has_aux=f.has_aux)(params, batch, *arrays)
        return grads[0] if f.has_aux else grads

    mapped = over_devices(grad, f.axis_name)
    jaxpr = jax.make_jaxpr(mapped)((params, arrays), stacked(shares, f.axis_name)).jaxpr
    made = [position_of(jaxpr, var) for var in jaxpr.outvars]
    return tuple(paths[i] for i in sorted(range(len(paths)), key=lambda i: made[i]))


def _require_rows(batch: Any) -> None:
    if not jax.tree.leaves(batch):
        raise ValueError(
            f"the batch has no arrays, got {batch!r}; loss_fn(params, batch) takes the rows "
            "of each device; pass values that all devices share as further arguments."
        )


def _require_floats(params: Any) -> None:
    _paths.require_arrays(params, "parameter")
    for path, leaf in jax.tree_util.tree_leaves_with_path(values_of(params)):
        _paths.require_float(_paths.path_name(path), jnp.result_type(leaf))


def _with_device_axis(out: tuple[Any, Any]) -> tuple[Any, Any]:
    value, grads = out
    return value, with_attached(_shards.leaving(grads), grads)


def _marked(grads: Any, kind: str, axis_name: AxisName) -> Any:
    """The gradients marked: as local over the axis, or as exchanged in the backward pass."""
    axes = _axes.names_of(axis_name)
    return map_leaves(lambda g: mark(g, kind, axes), lambda node: mark(node, FINISHED), grads)


def _first(tree: Any) -> Any:
    """What one device holds of arrays with a device axis."""
    return jax.tree.map(lambda x: x[0], tree)


def _spread(x: Any, axis_name: AxisName) -> Any:
    """A leaf of the batch with its examples spread over the axis, where types show shardings.

    A numpy array is on no device yet. Other shardings stay as they are.
    """
    first, *rest = jax.typeof(x).sharding.spec
    if set(_axes.names_in_entry(first)).issuperset(_axes.names_of(axis_name)):
        return x
    return jax.reshard(x, PartitionSpec(axis_name, *rest))
