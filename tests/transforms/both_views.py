"""Runs updates of a transformation in either view, on a 1-D and on a 2-D mesh."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm

Tree = dict[str, Any]

# `kernel` and `head` are compressed; `head` is sharded over "model" where there is one.
SHAPES = {"bias": (6,), "empty": (0, 3), "head": (4, 10), "kernel": (3, 7), "scale": ()}
SPECS = {name: PartitionSpec() for name in SHAPES} | {"head": PartitionSpec(None, "model")}


@dataclasses.dataclass(frozen=True)
class View:
    """Global or manual, with or without the checks of shard_map, on a mesh of this shape."""

    name: str
    manual: bool
    checks: bool = False
    model: int = 1

    def mesh(self, world: int) -> jax.sharding.Mesh:
        """`world` devices along "data", and `model` along "model" if that is more than one."""
        if self.model == 1:
            return jaxcomm.data_mesh(devices=jax.devices()[:world])
        shape, kinds = (world, self.model), (AxisType.Auto, AxisType.Auto)
        devices = jax.devices()[: world * self.model]
        return jax.make_mesh(shape, ("data", "model"), kinds, devices=devices)

    def spec(self, name: str) -> PartitionSpec:
        """How a parameter is sharded here."""
        return SPECS[name] if self.model > 1 else PartitionSpec()


VIEWS = [
    View("global", manual=False),
    View("manual", manual=True),
    View("manual with checks", manual=True, checks=True),
    View("global data x model", manual=False, model=2),
    View("manual data x model", manual=True, model=2),
    View("manual data x model with checks", manual=True, checks=True, model=2),
]
# Two that differ in all: who makes the region, its checks, the mesh.
APART = [VIEWS[2], VIEWS[3]]


def by_name(value: Any) -> str | None:
    """The id of a case that has views among its values."""
    return value.name if isinstance(value, View) else None


# The others have what these have, in another combination.
QUICK = [VIEWS[0], *APART]
# The newest jax has one of them here, the other where a test takes `in_views`.
each_view = pytest.mark.parametrize(
    "view",
    [
        pytest.param(
            view,
            marks=[pytest.mark.newest] * (view is APART[1])
            + [pytest.mark.slow] * (view not in QUICK),
        )
        for view in VIEWS
    ],
    ids=by_name,
)


def in_views(members: Iterable[Any], everywhere: Sequence[Any]) -> list[Any]:
    """Cases (member, view): some members in all views, the others in one of `APART` in turn.

    What a codec or a collective does, it does in the region that `on_every_device` makes in every
    view, so no member needs all views.
    """
    return [
        pytest.param(
            member,
            view,
            marks=[pytest.mark.newest] * (member in everywhere and view is APART[0])
            + [pytest.mark.slow] * (view not in QUICK),
        )
        for i, member in enumerate(members)
        for view in (VIEWS if member in everywhere else [APART[i % 2]])
    ]


def gradients(world: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Another gradient for every device: a leading device axis."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal((world, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def place(view: View, tree: Tree, *leading: str) -> Tree:
    """The arrays on the mesh that is set."""
    mesh = jax.sharding.get_mesh()
    return {
        name: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*leading, *view.spec(name))))
        for name, x in tree.items()
    }


def jit_update(view: View, tx: optax.GradientTransformation, params: Tree) -> Any:
    """A jitted `(grads, state) -> (updates, state)`; grads have a leading device axis."""

    def update_marked(grads: Tree, state: Any) -> Any:
        updates, state = tx.update(jaxcomm.mark_local(grads), state)
        return jaxcomm.unmark_local(updates), state

    if not view.manual:
        return jax.jit(update_marked)
    spec = jaxcomm.state_spec(tx, params, jax.sharding.get_mesh())
    local = {name: PartitionSpec("data", *view.spec(name)) for name in params}
    equal = {name: view.spec(name) for name in params}

    def update(grads: Tree, state: Any) -> Any:
        return update_marked(jax.tree.map(lambda g: g[0], grads), state)

    return jax.jit(
        jax.shard_map(
            update, in_specs=(local, spec), out_specs=(equal, spec), check_vma=view.checks
        )
    )


def types_of(state: Any) -> Any:
    """What must not change from step to step."""
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), state)


class Program:
    """A transformation in a view, compiled once for all the tests that look at it."""

    def __init__(self, view: View, tx: optax.GradientTransformation, like: Tree) -> None:
        """`like` has the shapes and dtypes of gradients, with a leading device axis."""
        self.view, self.tx, self.like = view, tx, like
        self.mesh = view.mesh(len(next(iter(like.values()))))
        with jax.set_mesh(self.mesh):
            params = {name: jnp.zeros(g.shape[1:], g.dtype) for name, g in like.items()}
            self.params = place(view, params)
            self.start, self.update = tx.init(self.params), jit_update(view, tx, self.params)

    def run(self, *batches: Tree, state: Any = None) -> list[tuple[Tree, Any]]:
        """The updates and states of several steps, which must not compile twice."""
        state, steps = self.start if state is None else state, []
        with jax.set_mesh(self.mesh):
            for grads in batches:
                updates, state = self.update(place(self.view, grads, "data"), state)
                steps.append((updates, state))
        assert self.update._cache_size() == 1
        assert jax.tree.structure(state) == jax.tree.structure(self.start)
        assert types_of(state) == types_of(self.start)
        return steps

    def lowered(self) -> jax.stages.Lowered:
        """The program before XLA has it."""
        with jax.set_mesh(self.mesh):
            return self.update.lower(place(self.view, self.like, "data"), self.start)

    def report(self) -> jaxcomm.WireReport:
        """What the compiled program sends."""
        return jaxcomm.wire_report(self.lowered().compile())


def run(view: View, tx: Any, batches: Sequence[Tree]) -> list[tuple[Tree, Any]]:
    """The updates and states of several steps of a program that no other test needs."""
    return Program(view, tx, batches[0]).run(*batches)


def one_update(view: View, tx: optax.GradientTransformation, grads: Tree) -> tuple[Tree, Any]:
    """The updates and the state after one step on these gradients; the mesh must be set."""
    params = place(view, {name: jnp.zeros(g.shape[1:], g.dtype) for name, g in grads.items()})
    state = tx.init(params)
    return jit_update(view, tx, params)(place(view, grads, "data"), state)


def nan_everywhere(updates: Tree) -> bool:
    """Whether every element of every copy of every leaf is NaN."""
    shards = (shard for u in updates.values() for shard in u.addressable_shards)
    return all(np.isnan(shard.data).all() for shard in shards)


def same_on_all_devices(x: jax.Array) -> bool:
    """Whether all copies of every part of a global array hold the same bits."""
    parts: dict[str, set[bytes]] = {}
    for shard in x.addressable_shards:
        parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    return all(len(copies) == 1 for copies in parts.values())
