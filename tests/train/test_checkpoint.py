"""Checkpoints keep all bits, of every device, and say what does not fit."""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
from train import digests, fitting
from train.checkpoint import Checkpoints, where_to_continue, where_to_evaluate
from train.errors import UserError
from train.state import TrainState


def position() -> grain.DatasetIterator:
    return iter(grain.MapDataset.range(100).to_iter_dataset())


TX = optax.chain(jaxcomm.mean("data", "int8", error_feedback=True), optax.sgd(0.1, momentum=0.9))


def mesh_of(world: int) -> jax.sharding.Mesh:
    return jaxcomm.data_mesh(devices=jax.devices()[:world])


def state_of(width: int, seed: int, world: int = 8) -> TrainState:
    """Replicated parameters and momentum, and residuals that differ from device to device."""
    rng = np.random.default_rng(seed)

    def drawn(leaf: jax.Array) -> jax.Array:
        if leaf.dtype != jnp.float32:
            return leaf
        return jax.device_put(rng.normal(size=leaf.shape).astype(np.float32), leaf.sharding)

    with jax.set_mesh(mesh_of(world)):
        params = jaxcomm.replicate({"0": {"w": jnp.zeros((width, 3))}})
        state = TrainState(jaxcomm.replicate(jnp.int32(seed)), params, TX.init(params))
        return jax.tree.map(drawn, state)


def residuals(state: TrainState) -> np.ndarray:
    return np.asarray(state.opt_state[0].residual.values[0])


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def restored(directory: Path, state: TrainState, world: int = 8) -> TrainState:
    """The newest whole checkpoint."""
    step = where_to_continue(directory, True, False)
    assert step is not None
    with jax.set_mesh(mesh_of(world)):
        return Checkpoints(directory, keep=2).restore(step, state, position(), TX)


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
    restored = Checkpoints(tmp_path, keep=2).restore(5, other, data, TX)
    assert bits(restored) == expected != bits(other)
    assert next(data) == 7
    sharding = restored.opt_state[0].residual.values[0].sharding
    assert sharding == NamedSharding(jaxcomm.data_mesh(), PartitionSpec("data"))
    assert restored.params["0"]["w"].sharding.is_fully_replicated


def test_the_newest_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state_of(5, step), position())
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    assert int(restored(tmp_path, state_of(5, 0)).step) == 3


def test_the_best_stays_beside_the_newest(tmp_path: Path) -> None:
    """A restart goes on from the newest; what was not tested, or is not finite, is never best."""
    losses = {1: 3.0, 2: 1.0, 3: np.nan, 4: None, 5: 2.0}
    tested = {
        step: loss and {"test_loss": loss, "test_accuracy": 1 / step}
        for step, loss in losses.items()
    }
    for best, kept in (("test_loss", 2), ("test_accuracy", 1)):
        folder = tmp_path / best
        checkpoints = Checkpoints(folder, 2, best)
        for step in losses:
            checkpoints.save(step, state_of(5, step), position(), tested[step])
        checkpoints.close()
        assert sorted(path.name for path in folder.iterdir()) == [str(kept), "4", "5"]
        assert where_to_continue(folder, True, False) == where_to_evaluate(folder, "") == 5
        assert where_to_evaluate(folder, best) == kept
        again = Checkpoints(folder, 2, best)  # It knows how good the others were.
        again.save(6, state_of(5, 6), position(), {"test_loss": 1.0, "test_accuracy": 0.5})
        again.close()
        left = ["5", "6"] if best == "test_loss" else ["1", "5", "6"]
        assert sorted(path.name for path in folder.iterdir()) == left
    plain = tmp_path / "plain"
    save(plain, 1)
    with pytest.raises(
        UserError, match="no complete checkpoint of a run with --config.checkpoint.best"
    ):
        where_to_evaluate(plain, "test_loss")


def test_a_damaged_test_of_an_old_checkpoint_stops_no_restart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, 1, "test_loss")
    for step in (1, 2):
        checkpoints.save(step, state_of(5, step), position(), {"test_loss": float(step)})
    checkpoints.close()
    cut(folder / "1" / "metrics" / "metrics")
    assert int(restored(folder, state_of(5, 0)).step) == 2
    aside = tmp_path / "damaged-checkpoint-1"
    said = f"checkpoint 1 is damaged (its metrics cannot be read): it is moved to {aside}\n"
    assert capfd.readouterr().err == said and aside.is_dir()
    with pytest.raises(UserError, match="continue it with"):
        where_to_continue(folder, False, False)


@pytest.mark.parametrize("written", ["", "{"])
def test_a_test_that_was_cut_off_costs_no_checkpoint(tmp_path: Path, written: str) -> None:
    """A run adds a test to the checkpoint of one that was asked to end, and is killed meanwhile."""
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, 1, "test_loss")
    checkpoints.save(1, state_of(5, 1), position())
    checkpoints.close()
    (folder / "1" / "metrics").mkdir()
    (folder / "1" / "metrics" / "metrics.tmp").write_text(written)
    assert int(restored(folder, state_of(5, 0)).step) == 1
    again = Checkpoints(folder, 1, "test_loss")
    again.score(1, {"test_loss": 1.0})
    again.close()
    assert where_to_evaluate(folder, "test_loss") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_half_written_checkpoint_is_not_seen(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state_of(5, 1), position())
    checkpoints.close()
    (tmp_path / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    again = Checkpoints(tmp_path, keep=2)
    assert where_to_continue(tmp_path, True, False) == 1
    assert int(again.restore(1, state_of(5, 0), position(), TX).step) == 1
    again.save(2, state_of(5, 2), position())
    again.close()
    assert int(restored(tmp_path, state_of(5, 0)).step) == 2


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: state_of(6, 0), r"params.0.w is float32\[5, 3\] there and float32\[6, 3\] here"),
        (
            lambda: state_of(5, 0)._replace(opt_state=()),
            r"opt_state.0.residual.values.0 is float32\[8, 5, 3\] there and absent here",
        ),
    ],
    ids=["model", "optimizer"],
)
def test_a_checkpoint_of_another_run(tmp_path: Path, state: Any, message: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state_of(5, 1), position())
    checkpoints.close()
    with pytest.raises(UserError, match=f"checkpoint 1 in .* does not fit .*: {message}"):
        restored(tmp_path, state())


def test_residuals_stay_with_their_parameters() -> None:
    """Where others are exempt, those of equal shapes would fit as well."""
    changed = ["sync.exempt=['b'] (was ['a'])"]
    with pytest.raises(UserError, match="config.sync.exempt decides which parameters have resid"):
        fitting.check_exempt(changed, state_of(5, 0))
    fitting.check_exempt(changed, state_of(5, 0)._replace(opt_state=()))
    fitting.check_exempt(["steps=3 (was 2)"], state_of(5, 0))
    state = state_of(5, 0)
    with jax.set_mesh(jaxcomm.data_mesh()):
        by_bucket = jaxcomm.one_bit_adam("data", 1e-3, dense_steps=1).init(state.params)
    with pytest.raises(UserError, match="which parameters have residuals"):
        fitting.check_exempt(changed, state._replace(opt_state=by_bucket))


def test_a_checkpoint_of_parameters_that_were_not_split(tmp_path: Path) -> None:
    """All arrays are alike; only what is static says how parameters travel."""

    def begin(tx: optax.GradientTransformation) -> TrainState:
        with jax.set_mesh(mesh_of(2)):
            params = jaxcomm.replicate({"w": jnp.zeros(3)})
            return TrainState(jaxcomm.replicate(jnp.int32(1)), params, tx.init(params))

    plain = jaxcomm.mean("data", "bfloat16")
    split = jaxcomm.sharded(plain, "bfloat16")
    for before, after in ((plain, split), (split, plain)):
        folder = tmp_path / str(before is plain)
        checkpoints = Checkpoints(folder, keep=2)
        checkpoints.save(1, begin(before), position())
        checkpoints.close()
        with pytest.raises(UserError, match="checkpoint 1 in .* is of another config.sync, such"):
            Checkpoints(folder, keep=2).restore(1, begin(after), position(), after)


def test_split_parameters_of_other_shapes(tmp_path: Path) -> None:
    """Their first dimension is over the devices, and yet no device has one of its own."""
    tx = optax.chain(jaxcomm.sharded(jaxcomm.mean("data")), optax.trace(0.9))

    def begin(rows: int) -> TrainState:
        with jax.set_mesh(mesh_of(2)):
            params = jaxcomm.shard({"w": jnp.zeros((rows, 4))}, "data")
            return TrainState(jaxcomm.replicate(jnp.int32(1)), params, tx.init(params))

    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, begin(16), position())
    checkpoints.close()
    message = r"params.w is float32\[16, 4\] there and float32\[8, 4\] here"
    with pytest.raises(UserError, match=message):
        Checkpoints(tmp_path, keep=2).restore(1, begin(8), position(), tx)


def test_another_number_of_devices_and_of_processes(tmp_path: Path) -> None:
    """4 -> 2 -> 1 -> 3 -> 4: parameters and momentum to the bit, residuals in the mean."""
    state, worlds = state_of(5, 1, world=4), (4, 2, 1, 3, 4)
    exact, owed = bits((state.params, state.opt_state[1])), residuals(state).mean(0)
    assert np.abs(owed).min() > 1e-3
    for before, after in itertools.pairwise(worlds):
        folder = tmp_path / f"{before}{after}"
        checkpoints = Checkpoints(folder, keep=2)
        data = position()
        for _ in range(7):
            next(data)
        checkpoints.save(1, state, data)
        checkpoints.close()
        inputs = folder / "1" / "input"
        (inputs / "process_0-of-1.json").rename(inputs / "process_0-of-5.json")
        digests.seal(folder / "1")
        data = position()
        with jax.set_mesh(mesh_of(after)):
            begin = state_of(5, 9, world=after)
            state = Checkpoints(folder, keep=2).restore(1, begin, data, TX)
        assert next(data) == 7
        assert bits((state.params, state.opt_state[1])) == exact
        assert residuals(state).shape == (after, 5, 3)
        np.testing.assert_allclose(residuals(state).mean(0), owed, rtol=1e-6)


def test_nothing_to_resume_and_something_in_the_way(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert where_to_continue(folder, False, False) is None
    assert where_to_continue(folder, False, True) is None  # The first start saved nothing.
    with pytest.raises(UserError, match="checkpoint.resume: there is no complete checkpoint in"):
        where_to_continue(folder, True, False)
    save(folder, 1)
    with pytest.raises(UserError, match="has a checkpoint of step 1; continue it with --config.ch"):
        where_to_continue(folder, False, False)
    assert where_to_continue(folder, False, True) == 1


def save(folder: Path, *steps: int) -> None:
    checkpoints = Checkpoints(folder, keep=9)
    for step in steps:
        checkpoints.save(step, state_of(5, step), position())
    checkpoints.close()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def largest(folder: Path) -> Path:
    return max(folder.glob("state/**/d/*"), key=lambda path: path.stat().st_size)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "data cut": (lambda step: cut(largest(step)), r"state/.*d/.* has \d+ bytes instead of \d+"),
    "a bit of data": (lambda step: flip(largest(step)), "state/.*d/.* has other bytes than were"),
    "metadata cut": (lambda step: cut(step / "state" / "_METADATA"), "state/_METADATA has"),
    "orbax's metadata cut": (
        lambda step: cut(step / "_CHECKPOINT_METADATA"),
        "_CHECKPOINT_METADATA is cut",
    ),
    "digests cut": (lambda step: cut(step / "digests.json"), "digests.json is cut"),
    "digests of another form": (
        lambda step: (step / "digests.json").write_text("[]"),
        "digests.json is no table",
    ),
    "state missing": (lambda step: shutil.rmtree(step / "state"), "state/.* is missing"),
    "all missing": (
        lambda step: [
            shutil.rmtree(path) if path.is_dir() else path.unlink() for path in step.iterdir()
        ],
        "_CHECKPOINT_METADATA is missing",
    ),
    "a file in its place": (
        lambda step: [shutil.rmtree(step), step.touch()],
        "_CHECKPOINT_METADATA cannot be read: Not a directory",
    ),
    "input position cut": (
        lambda step: cut(step / "input" / "process_0-of-1.json"),
        "input/process_0-of-1.json has",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], saved_twice: Path
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved_twice, folder)
    damage, reason = DAMAGE[kind]
    damage(folder / "2")
    assert int(restored(folder, state_of(5, 0)).step) == 1
    (line,) = capfd.readouterr().err.splitlines()
    aside = tmp_path / "damaged-checkpoint-2"
    assert re.match(rf"checkpoint 2 is damaged \({reason}.*\): it is moved to {aside}, and", line)
    assert aside.exists()
    save(folder, 2)  # It does not stand in the way of the next one.
    assert int(restored(folder, state_of(5, 0)).step) == 2


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 1, 2)
    return folder


def test_no_checkpoint_without_damage(tmp_path: Path, saved_twice: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved_twice, folder)
    for step in (1, 2):
        cut(folder / str(step) / "digests.json")
    assert where_to_continue(folder, False, True) is None
    with pytest.raises(UserError, match="there is no complete checkpoint in"):
        where_to_continue(folder, True, False)


def test_among_equals_the_newest_is_best(tmp_path: Path) -> None:
    checkpoints, tested = Checkpoints(tmp_path, 2, "test_accuracy"), {"test_accuracy": 0.5}
    for step in (1, 2):
        checkpoints.save(step, state_of(5, step), position(), tested)
    checkpoints.close()
    assert where_to_evaluate(tmp_path, "test_accuracy") == 2


def test_a_test_that_was_added_outlives_a_restart(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, "test_loss")
    checkpoints.save(1, state_of(5, 1), position())
    checkpoints.score(1, {"test_loss": 1.0})
    checkpoints.close()
    assert where_to_continue(tmp_path, True, False) == 1
    assert where_to_evaluate(tmp_path, "test_loss") == 1


def test_a_test_of_a_checkpoint_is_not_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, "test_loss")
    checkpoints.save(1, state_of(5, 1), position(), {"test_loss": 1.0})
    checkpoints.score(1, {"test_loss": 2.0})
    checkpoints.close()
    found = json.loads((tmp_path / "1" / "metrics" / "metrics").read_text())
    assert found == {"test_loss": 1.0}
