"""Checks of what a loss function takes and what it returns."""

import contextlib
import functools
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _axes
from jaxcomm._aux import Aux, differing, is_same
from jaxcomm._axes import AxisName
from jaxcomm._nnx import changed, held_by, refuse_changes
from jaxcomm._users_line import users_line

# Errors of jax about a spec with an axis over which the loss runs device by device.
_NAMES_AN_AXIS = (
    "with_sharding_constraint|shard_map in_specs|axis names that are of type Auto or Manual"
)
# And of libraries that compare types, in which arrays inside jax.shard_map have a mesh.
_COMPARES_TYPES = "operator structures do not match|pytree does not match out_structure"


def bound(
    loss_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """The loss as a function of arrays alone, and the arrays among its further arguments.

    The function refuses a loss that changes variables of Flax NNX, if their new values are lost.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))

    def is_array(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)

    def given(arrays: tuple[Any, ...]) -> Any:
        rest = iter(arrays)
        return tree.unflatten([next(rest) if is_array(leaf) else leaf for leaf in leaves])

    def of_arrays(params: Any, batch: Any, *arrays: Any) -> Any:
        further = args, kwargs = given(arrays)
        before = held_by(params, further)
        copy = jax.tree.flatten(params) if before else None
        out = loss_fn(params, batch, *args, **kwargs)
        if copy and (paths := changed(before, held_by(params, further))):

            def retrace() -> Any:
                params, (args, kwargs) = copy[1].unflatten(copy[0]), given(arrays)
                old = held_by(params, (args, kwargs))
                out = loss_fn(params, batch, *args, **kwargs)
                new = held_by(params, (args, kwargs))
                aux = out[1:] if isinstance(out, tuple | list) else ()
                return *([x[path].values for path in paths] for x in (old, new)), aux

            refuse_changes(paths, before, retrace)
        return out

    return of_arrays, [leaf for leaf in leaves if is_array(leaf)]


@contextlib.contextmanager
def saying_where(axis_name: AxisName) -> Iterator[None]:
    """Surrounds the loss: adds to errors that come of where it runs what jax cannot know."""
    try:
        yield
    except (AssertionError, ValueError) as error:
        if re.search(_COMPARES_TYPES, str(error)) or _is_assertion_of_jax(error):
            error.add_note(
                "jaxcomm.value_and_grad: the loss runs inside jax.shard_map, where diffrax, lineax "
                "and optimistix fail, and numpyro unless numpyro.enable_validation(False). If it "
                "works without, take the gradient of each device's rows by jax.vmap, and give it "
                'to jaxcomm.mark_local (recipes, "Losses that fail inside shard_map").'
            )
        elif re.search(_NAMES_AN_AXIS, str(error)):
            error.add_note(
                f"jaxcomm.value_and_grad: the loss runs device by device along {axis_name!r}, on "
                "each device's own rows. Leave that axis out of the model's specs; others may "
                "stay. Of parameters that Flax boxed by nn.with_partitioning, pass "
                "flax.linen.unbox(params)."
            )
        raise


def _is_assertion_of_jax(error: Exception) -> bool:
    """Whether it says nothing, and comes from jax itself: for a sharding inside jax.shard_map."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_of_jax = frames[-1].f_globals.get("__name__", "").startswith("jax.")
    return isinstance(error, AssertionError) and not str(error) and is_of_jax


def loss_and_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """The loss and aux that a loss function returned; aux is () if there is none.

    Raises:
      TypeError: if they are not what `has_aux` says, or the loss is None.
    """
    if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(
            f"with has_aux=True the loss function returns (loss, aux), got {type(out).__name__}."
        )
    if not has_aux and isinstance(out, tuple | list | dict):
        raise TypeError(
            f"the loss function returned a {type(out).__name__}, not a loss alone; if it returns "
            "(loss, aux), pass has_aux=True."
        )
    loss, aux = out if has_aux else (out, ())
    if loss is None:
        raise TypeError("the loss function returned None; return the loss.")
    return loss, aux


def refuse_rows(
    aux: Any, with_marks: Aux, aux_of: Callable[[Any], Any], batch: Any, axis_name: Any
) -> None:
    """Raises if aux has a row for each example, as a mean over devices would mix examples.

    A number of features can equal the number of rows by chance. So if any leaf has as many rows,
    the loss is traced again with twice as many.

    Args:
      aux: what the loss returned.
      with_marks: its leaves; those that are the same everywhere have no mean.
      aux_of: a function from another batch to its aux.
      batch: one device's batch, or one microbatch.
      axis_name: the mesh axis, for the message.
    """
    rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    found = {
        path: leaf
        for (path, leaf), marked in zip(
            jax.tree_util.tree_leaves_with_path(aux), with_marks.leaves, strict=True
        )
        if not is_same(marked) and jnp.ndim(leaf) and jnp.shape(leaf)[:1] in rows
    }
    if not found:
        return
    twice = lambda: aux_of(jax.tree.map(lambda x: jnp.concatenate([x, x]), batch))  # noqa: E731
    try:
        other = dict(jax.tree_util.tree_leaves_with_path(jax.eval_shape(twice)))
    except Exception:  # a loss of one number of rows, or one that looks at values
        other = None
    for path, leaf in found.items():
        n = leaf.shape[0]
        text = (
            f"aux{jax.tree_util.keystr(path)} has a row for each example, {n} on each device, and "
            "aux is a mean over devices, which would mix different examples. Return what you want "
            "to know about them, such as their mean, or the rows of all devices: "
            f"jax.lax.all_gather(x, {axis_name!r}, tiled=True)."
        )
        if other is None:
            warnings.warn(f"if {text}", stacklevel=users_line())
        elif path in other and other[path].shape[:1] == (2 * n,):
            raise ValueError(text)


def refuse_refs(args: Any) -> None:
    """Raises for mutable arrays, which a part of a program on every device cannot take."""
    for x in jax.tree.leaves(args):
        if type(getattr(x, "aval", None)).__name__ == "AbstractRef":  # its name is not public
            raise TypeError(
                "a further argument of the loss is a Ref (jax.new_ref), and the loss runs on every "
                "device apart. Pass its value, ref[...], and return what changes as aux "
                "(has_aux=True)."
            )


def passed_whole(x: Any, axis_name: AxisName) -> Any:
    """A further argument as all devices along the axis get it, where types show shardings."""
    own = _axes.names_of(axis_name)
    if not _axes.explicit_axes().issuperset(own):
        return x
    names = [_axes.names_in_entry(entry) for entry in jax.typeof(x).sharding.spec]
    kept = [tuple(name for name in entry if name not in own) for entry in names]
    return jax.reshard(x, jax.P(*(entry or None for entry in kept))) if kept != names else x


def warn_of_rows(
    loss_fn: Callable[..., Any],
    batch: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    world: int,
) -> list[str]:
    """Warns about an argument with as many rows as the batch: it is not split over devices.

    Trees are left alone: statistics and other states have any number of rows.

    Returns:
      What was warned of.
    """
    found: list[str] = []
    if world == 1:
        return found
    rows = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)}
    given = {f"argument {place} of the loss": arg for place, arg in enumerate(args, start=3)}
    given |= {f"{name} of the loss": arg for name, arg in kwargs.items()}
    given |= {
        f"{name}, which the loss closes over,": x for name, x in _closed_over(loss_fn).items()
    }
    for name, arg in given.items():
        is_array = isinstance(arg, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
        if is_array and arg.shape and arg.shape[0] in rows:
            found.append(
                f"{name} has as many rows as the batch, {arg.shape[0]}, but is passed in full to "
                f"each of the {world} devices: only the batch, argument 2, is split. Put whatever "
                "belongs to its rows into the batch, as in loss(params, (x, y))."
            )
            warnings.warn(found[-1], stacklevel=users_line())
    return found


def _closed_over(f: Callable[..., Any]) -> dict[str, Any]:
    """The values that a function closes over, by name."""
    if isinstance(f, functools.partial):
        return f.keywords | _closed_over(f.func)
    if not inspect.isfunction(f) or f.__closure__ is None:
        return {}
    cells = zip(f.__code__.co_freevars, f.__closure__, strict=True)
    return {name: _contents(cell) for name, cell in cells}


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # a name that is not bound yet


def check_loss(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    args: Any,
    has_aux: bool,
    axis_name: AxisName,
    microbatches: int,
    vary: bool,
) -> Collection[int]:
    """Raises if the loss is the same on all devices by construction; returns which aux is.

    Under a `vmap` over the devices, which binds the axis name, a loss is the same for all if it
    does not use its batch or was reduced over the axis. Where the checks of shard_map are on, types
    show reductions. The other errors of a loss are raised in the real trace.

    Args:
      loss_fn: the loss.
      params: arrays or `jax.ShapeDtypeStruct`s, as one device gets them.
      batch: one device's share, likewise.
      args: its further arguments, likewise.
      has_aux: whether it also returns aux.
      axis_name: the axes of the devices.
      microbatches: their number. Aux has to be the same in all of them too.
      vary: whether parameters differ between devices or microbatches.

    Returns:
      The leaves of aux that are the same, if the further arguments are; as far as can be seen.
    """
    # Nothing is closed over: jax would report what a failed trace holds as a leak.
    inputs = params, args

    def results(inputs: tuple[Any, Any], batch: Any) -> list[jax.Array]:
        loss, aux = loss_and_aux(loss_fn(inputs[0], batch, *inputs[1]), has_aux)
        return [jnp.asarray(x) for x in (loss, *jax.tree.leaves(aux))]

    def of_two(inputs: tuple[Any, Any], batch: Any) -> Any:
        two = jax.tree.map(lambda x: jnp.stack([x, x]), batch)
        loss: Any = lambda inputs, batch: results(inputs, batch)[0]  # noqa: E731
        return jax.vmap(loss, in_axes=(None, 0), out_axes=None)(inputs, two)

    if not (_axes.is_manual(axis_name) and _axes.checks_on(axis_name)):
        names, shares = _axes.names_of(axis_name), stacked(batch, axis_name)
        try:
            differ = differing(results, names, inputs, shares)
            if all(of_results[0] for of_results in differ):
                if vary:
                    given = stacked((params, batch), axis_name)
                    differ += differing(lambda a, x: results((x[0], a), x[1]), names, args, given)
                if microbatches > 1:
                    parts = stacked(_two_of(batch, microbatches), axis_name)
                    differ += differing(results, [*names, None], inputs, parts)
                of_aux = list(zip(*differ, strict=True))[1:]
                return [i for i, along in enumerate(of_aux) if not any(along)]
        except Exception:
            return ()
        if not _traces(of_two, inputs, batch):
            raise ValueError(already_reduced(axis_name))
    if _traces(of_two, inputs, batch):
        raise ValueError(
            "the loss does not depend on the batch, so all devices have the same gradient and "
            "there is nothing to exchange. loss_fn(params, batch) must use what it is given."
        )
    return ()


def over_devices(
    f: Callable[[Any, Any], Any], axis_name: AxisName, unmapped: str | None = None
) -> Callable[[Any, Any], Any]:
    """`f(params, batch)` for every device's share, with the axis names bound.

    Args:
      f: what one device does.
      axis_name: the axes.
      unmapped: the axis along which all results must be equal by construction, if any.

    Returns:
      `f` of a batch with a leading axis for each mesh axis.
    """
    for name in reversed(_axes.names_of(axis_name)):
        out_axes = None if name == unmapped else 0
        f = jax.vmap(f, in_axes=(None, 0), out_axes=out_axes, axis_name=name)
    return f


def stacked(batch: Any, axis_name: AxisName) -> Any:
    """The shapes of the shares of all devices, with a leading axis for each mesh axis."""
    sizes = [_axes.axis_size(name) for name in _axes.names_of(axis_name)]
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*sizes, *x.shape), x.dtype), batch)


def _two_of(batch: Any, microbatches: int) -> Any:
    """The shapes of two microbatches, with a leading axis for them."""

    def of_two(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2, x.shape[0] // microbatches, *x.shape[1:]), x.dtype)

    return jax.tree.map(of_two, batch)


def _traces(f: Callable[..., Any], *args: Any) -> bool:
    """Whether a function can be traced."""
    try:
        jax.eval_shape(f, *args)
    except Exception:
        return False
    return True


def already_reduced(axis_name: AxisName) -> str:
    """The message for a loss that was reduced over the axis."""
    return (
        f"the loss is already reduced over {axis_name!r}, so its gradient is not this device's "
        "own. Return the mean over the examples that loss_fn is given; jaxcomm.value_and_grad "
        "averages the loss over devices itself. A loss that compares rows of all devices returns "
        "the terms of this device's rows: docs/recipes.md, A loss over the global batch."
    )
