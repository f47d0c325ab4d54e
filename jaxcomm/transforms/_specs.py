"""How parameters are sharded over axes other than the exchange's, as `init` sees it."""

import contextvars
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcomm import _axes
from jaxcomm._axes import AxisName, names_in_entry
from jaxcomm._users_line import users_line

# How parameters are sharded, by path, for `init` where their types do not show it.
GIVEN_SPECS: contextvars.ContextVar[dict[str, PartitionSpec]] = contextvars.ContextVar("specs")
# Whether specs name axes of one device too, over which types of the manual view vary.
ALL_AXES: contextvars.ContextVar[bool] = contextvars.ContextVar("all_axes", default=False)


def varying_in(named: Sequence[tuple[str, Any]], axis_name: AxisName) -> list[frozenset[str]]:
    """The axes that are manual here, but not the exchange's, over which each parameter differs.

    Without the checks of `jax.shard_map` types do not show it: only given specs do.
    """
    further = _axes.manual_axes().difference(_axes.names_of(axis_name))
    further = frozenset(axis for axis in further if _axes.axis_size(axis) > 1)
    if not further:
        return [further] * len(named)
    if all(_axes.checks_on(axis) for axis in further):
        return [_axes.varying_axes(leaf) & further for _, leaf in named]
    given = GIVEN_SPECS.get({})
    if len(named) > 1 and not {name for name, _ in named} <= given.keys():
        warnings.warn(
            f"with check_vma=False, tx.init cannot see inside jax.shard_map which parameters are "
            f"split over {', '.join(map(repr, sorted(further)))}, and takes all for equal along "
            "it. If some are split, copies of the others may drift apart: call tx.init outside, "
            "on placed parameters, or make tx jaxcomm.with_param_specs(tx, specs).",
            UserWarning,
            stacklevel=users_line(),
        )
    return [names_in(given.get(name, PartitionSpec())) & further for name, _ in named]


def spec_of(leaf: Any, name: str, axis_name: AxisName | None) -> PartitionSpec:
    """How a parameter is sharded over axes that are not manual here and have several devices.

    Axes of one device are kept where they are part of types, and within `ALL_AXES`. Over the axis
    of the exchange it must not be sharded; None stands for no exchange.
    """
    current, own = _axes.current_mesh(), () if axis_name is None else _axes.names_of(axis_name)
    kinds = dict(zip(current.axis_names, current.axis_types, strict=True))
    further = frozenset(
        axis
        for axis, kind in kinds.items()
        if kind != AxisType.Manual and axis not in own
        if kind == AxisType.Explicit or current.shape[axis] > 1 or ALL_AXES.get()
    )
    traced, given = isinstance(leaf, Tracer), GIVEN_SPECS.get({})
    hidden = traced and any(
        kinds[axis] == AxisType.Auto and current.shape[axis] > 1 for axis in further
    )
    if hidden and name not in given:
        raise ValueError(
            f"cannot see inside jax.jit or jax.vmap how parameter {name} is sharded over "
            f"{sorted(further)}; use jaxcomm.with_param_specs(tx, specs), or call tx.init(params) "
            "outside of both, on placed parameters."
        )
    sharding = getattr(jax.typeof(leaf) if traced else leaf, "sharding", None)
    seen = sharding.spec if isinstance(sharding, NamedSharding) and not hidden else None
    spec = given.get(name, PartitionSpec()) if seen is None else seen
    if restrict(given.get(name, spec), further) != restrict(spec, further):
        raise ValueError(
            f"parameter {name} is sharded by {spec}, but jaxcomm.with_param_specs was given "
            f"{given[name]}; pass the spec that the parameter has."
        )
    if (over := names_in(spec).intersection(own)) and axis_name and _axes.axis_size(axis_name) > 1:
        raise ValueError(
            f"parameter {name} is sharded over {', '.join(map(repr, sorted(over)))}; data-parallel "
            f"parameters are equal on all devices of {axis_name!r}. Place them with "
            "jaxcomm.replicate, shard over another axis (such as experts), or put the exchange "
            "inside jaxcomm.sharded (FSDP), in a chain without local, multi_steps, "
            "control_variates or local_steps (microbatches: jaxcomm.accumulate)."
        )
    return restrict(spec, further)


def restrict(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    """The spec with these axes only, and without trailing Nones."""
    kept = [tuple(n for n in names_in_entry(entry) if n in axes) for entry in spec]
    while kept and not kept[-1]:
        kept.pop()
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in kept))


def names_in(spec: PartitionSpec) -> frozenset[str]:
    """The axes that a spec names."""
    return frozenset(name for entry in spec for name in names_in_entry(entry))


def axes_in(spec: PartitionSpec, dimensions: int) -> list[tuple[str, ...]]:
    """The axes over which each dimension of an array is sharded."""
    named = [names_in_entry(entry) for entry in spec]
    return named + [()] * (dimensions - len(named))
