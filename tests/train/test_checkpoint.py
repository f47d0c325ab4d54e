"""Checkpoints keep all bits, of every device, and say what does not fit."""

from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
from train.checkpoint import Checkpoints
from train.errors import UserError
from train.state import TrainState


def position() -> grain.DatasetIterator:
    return iter(grain.MapDataset.range(100).to_iter_dataset())


def state_of(width: int, seed: int, world: int = 8) -> TrainState:
    """Replicated parameters, and residuals that differ from device to device."""
    mesh = jaxcomm.data_mesh(devices=jax.devices()[:world])
    rng = np.random.default_rng(seed)
    residuals = rng.normal(size=(world, width)).astype(np.float32)
    with jax.set_mesh(mesh):
        return TrainState(
            step=jaxcomm.replicate(jnp.int32(seed)),
            params=jaxcomm.replicate({0: {"w": jnp.asarray(rng.normal(size=width), jnp.float32)}}),
            opt_state=({"residual": jaxcomm.global_batch(residuals, "data")}, ()),
        )


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_all_bits_of_all_devices_come_back(tmp_path: Path) -> None:
    saved, data = state_of(37, 5), position()
    expected = bits(saved)
    for _ in range(7):
        next(data)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(5, saved, data)
    # The next step takes the memory of the state; what is being written must not care.
    jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(saved)
    checkpoints.close()
    other, data = state_of(37, 6), position()
    restored = Checkpoints(tmp_path, keep=2).restore(other, data)
    assert bits(restored) == expected != bits(other)
    assert next(data) == 7
    sharding = restored.opt_state[0]["residual"].sharding
    assert sharding == NamedSharding(jaxcomm.data_mesh(), PartitionSpec("data"))
    assert restored.params[0]["w"].sharding.is_fully_replicated


def test_the_newest_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state_of(5, step), position())
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    assert int(Checkpoints(tmp_path, keep=2).restore(state_of(5, 0), position()).step) == 3


def test_a_half_written_checkpoint_is_not_seen(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state_of(5, 1), position())
    checkpoints.close()
    (tmp_path / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    again = Checkpoints(tmp_path, keep=2)
    assert int(again.restore(state_of(5, 0), position()).step) == 1
    again.save(2, state_of(5, 2), position())
    again.close()
    assert int(Checkpoints(tmp_path, keep=2).restore(state_of(5, 0), position()).step) == 2


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: state_of(6, 0), r"params.0.w is float32\[5\] there and float32\[6\] here"),
        (
            lambda: state_of(5, 0, world=4),
            r"opt_state.0.residual is float32\[8, 5\] there and float32\[4, 5\] here",
        ),
        (
            lambda: state_of(5, 0)._replace(opt_state=()),
            r"opt_state.0.residual is float32\[8, 5\] there and absent here",
        ),
    ],
    ids=["model", "devices", "optimizer"],
)
def test_a_checkpoint_of_another_run(tmp_path: Path, state: Any, message: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state_of(5, 1), position())
    checkpoints.close()
    with pytest.raises(UserError, match=f"checkpoint 1 in .* does not fit .*: {message}"):
        Checkpoints(tmp_path, keep=2).restore(state(), position())


def test_a_checkpoint_of_another_number_of_processes(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state_of(5, 1), position())
    checkpoints.close()
    (tmp_path / "1" / "input" / "process_0-of-1.json").rename(
        tmp_path / "1" / "input" / "process_0-of-2.json"
    )
    with pytest.raises(UserError, match="is one of another number of processes than 1"):
        Checkpoints(tmp_path, keep=2).restore(state_of(5, 0), position())


def test_nothing_to_resume_and_something_in_the_way(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.require_none()
    with pytest.raises(UserError, match="there is no checkpoint in"):
        checkpoints.restore(state_of(5, 0), position())
    checkpoints.save(1, state_of(5, 1), position())
    checkpoints.close()
    with pytest.raises(UserError, match="has a checkpoint of step 1; continue it with --config.ch"):
        Checkpoints(tmp_path, keep=2).require_none()
