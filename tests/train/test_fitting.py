"""What is said of checkpoints whose arrays for each device do not fit the run."""

import functools
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from train.checkpoint import Checkpoints
from train.errors import UserError
from train.state import TrainState


def position() -> grain.DatasetIterator:
    return iter(grain.MapDataset.range(100).to_iter_dataset())


def mesh_of(world: int) -> jax.sharding.Mesh:
    return jaxcomm.data_mesh(devices=jax.devices()[:world])


def save(folder: Path, state: TrainState) -> None:
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.save(1, state, position())
    checkpoints.close()


def begin_on(mesh: jax.sharding.Mesh, tx: optax.GradientTransformation) -> TrainState:
    """The state before the first step, of parameters that an axis "fsdp" splits if there is one."""
    params: Any = {"v": jnp.zeros((32, 64)), "w": jnp.zeros((64, 64))}
    with jax.set_mesh(mesh):
        is_split = "fsdp" in mesh.axis_names
        params = jaxcomm.shard(params, "fsdp") if is_split else jaxcomm.replicate(params)
        return TrainState(jaxcomm.replicate(jnp.int32(1)), params, tx.init(params))


ONE_BIT = functools.partial(jaxcomm.one_bit_adam, "data", 0.1, dense_steps=1)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            jaxcomm.low_rank_mean("data", 4),
            jaxcomm.low_rank_mean("data", 2),
            r"factors.values.0 is float32\[4, 128\] there and float32\[2, 64\] here",
        ),
        (
            ONE_BIT(),
            ONE_BIT(exempt=["v"]),
            r"worker_error.values.0 is float32\[4, 6144\] there and float32\[2, 4096\] here",
        ),
    ],
    ids=["rank", "exempt"],
)
def test_another_exchange_on_another_number_of_devices(
    before: Any, after: Any, message: str, tmp_path: Path
) -> None:
    """It is a mistake of the user, which no restart mends."""
    save(tmp_path, begin_on(mesh_of(4), before))
    with jax.set_mesh(mesh_of(2)):
        with pytest.raises(UserError, match=f"checkpoint 1 in .* does not fit .*{message}"):
            Checkpoints(tmp_path, keep=2).restore(1, begin_on(mesh_of(2), after), position(), after)
        # What only `resize_state` can see.
        with pytest.raises(UserError, match="not one of this transformation"):
            Checkpoints(tmp_path, keep=2).restore(
                1, begin_on(mesh_of(2), before), position(), jaxcomm.mean("data")
            )


@pytest.mark.parametrize("fsdp", [1, 2])
def test_parameters_that_were_split_otherwise(fsdp: int, tmp_path: Path) -> None:
    """The vectors of errors are as long as before, but their values lie in other places."""
    tx, devices = ONE_BIT(), np.reshape(jax.devices()[:4], (2, 2))
    before, after = mesh_of(4), jax.sharding.Mesh(devices, ("data", "fsdp"))
    if fsdp == 2:
        before, after = after, before
    save(tmp_path, begin_on(before, tx))
    message = (
        f"depends on config.sync.fsdp, which was {fsdp}; continue with --config.sync.fsdp={fsdp},"
    )
    with jax.set_mesh(after), pytest.raises(UserError, match=message):
        Checkpoints(tmp_path, keep=2).restore(1, begin_on(after, tx), position(), tx)


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2)])
def test_split_parameters_and_one_device(worlds: tuple[int, int], tmp_path: Path) -> None:
    """One device splits nothing, and keeps other residuals; the line says so."""
    tx = jaxcomm.sharded(jaxcomm.mean("data", "int8", error_feedback=True), "bfloat16")

    def begin(world: int) -> TrainState:
        with jax.set_mesh(mesh_of(world)):
            params = jaxcomm.shard({"w": jnp.zeros((64, 64))}, "data")
            return TrainState(jaxcomm.replicate(jnp.int32(1)), params, tx.init(params))

    save(tmp_path, begin(worlds[0]))
    message = f"residual.* absent .*several devices to one, or back: .* before, {worlds[0]}, or"
    with jax.set_mesh(mesh_of(worlds[1])), pytest.raises(UserError, match=message):
        Checkpoints(tmp_path, keep=2).restore(1, begin(worlds[1]), position(), tx)
