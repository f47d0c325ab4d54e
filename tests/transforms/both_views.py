"""Runs one `update` of a transformation in either view, on a 1-D and on a 2-D mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    if not view.manual:
        return jax.jit(tx.update)
    spec = jaxcomm.state_spec(tx, params, jax.sharding.get_mesh())
    local = {name: PartitionSpec("data", *view.spec(name)) for name in params}
    equal = {name: view.spec(name) for name in params}

    def update(grads: Tree, state: Any) -> Any:
        return tx.update(jax.tree.map(lambda g: g[0], grads), state)

    return jax.jit(
        jax.shard_map(
            update, in_specs=(local, spec), out_specs=(equal, spec), check_vma=view.checks
        )
    )


def one_update(view: View, tx: optax.GradientTransformation, grads: Tree) -> tuple[Tree, Any]:
    """The updates and the state after one step on these gradients; the mesh must be set."""
    params = place(view, {name: jnp.zeros(g.shape[1:], g.dtype) for name, g in grads.items()})
    state = tx.init(params)
    return jit_update(view, tx, params)(place(view, grads, "data"), state)


def same_on_all_devices(x: jax.Array) -> bool:
    """Whether all copies of every part of a global array hold the same bits."""
    parts: dict[str, set[bytes]] = {}
    for shard in x.addressable_shards:
        parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    return all(len(copies) == 1 for copies in parts.values())
