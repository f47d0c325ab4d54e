"""The end of 1-bit Adam's warm-up is found in its state, said once, and kept in the metrics."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from ml_collections import config_dict
from running import read_config, read_lines

import jaxcomm
from train import loop, metrics, watched

LINE = "step {}: the optimizer's warm-up has ended"


class Method(NamedTuple):
    """A state of somebody else's optimizer."""

    count: int
    frozen_at: Any


def test_the_field_is_found_wherever_it_lies() -> None:
    nested = (optax.EmptyState(), {"inner": [Method(9, jnp.int32(7))]})
    assert watched.step_of(nested) == 7
    assert watched.step_of(optax.adam(0.1).init({"frozen_at": jnp.ones(3)})) == 0
    assert watched.frozen_at((Method(9, None), ())) is None


def test_the_field_is_jaxcomms() -> None:
    tx = optax.chain(jaxcomm.one_bit_adam("data", 0.1, dense_steps=2), optax.scale(1.0))
    with jax.set_mesh(jaxcomm.data_mesh()):
        params = jaxcomm.replicate({"w": jnp.ones((4, 4))})
        opt_state, update, found = tx.init(params), jax.jit(tx.update), []
        for _ in range(3):
            grads = {"w": jaxcomm.global_batch(jnp.ones((8, 4, 4)), "data")}
            _, opt_state = update(grads, opt_state, params)
            found.append(watched.step_of(opt_state))
    assert found == [0, 2, 2]


def record(workdir: Path, start: int, stop: int, values: list[int], before: int = 0) -> int:
    """Records steps whose metrics hold these values of `frozen_at`; returns what it ends with."""
    with metrics.Recorder(workdir, start, stop, before) as recorder:
        for step, value in zip(range(start + 1, stop + 1), values, strict=True):
            recorder.train(step, {"loss": jnp.float32(1), "frozen_at": jnp.int32(value)})
        with recorder.pause("test"):
            return recorder.frozen_at


def test_the_end_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The third step was not finite, so the method counts one less than the loop.
    assert record(tmp_path, 0, 6, [0, 0, 0, 3, 3, 3]) == 3
    shown = capsys.readouterr()
    assert shown.err.count("warm-up") == 1 and LINE.format(4) in shown.err and shown.out == ""
    assert read_lines(tmp_path, "warmup_ended") == [
        {"kind": "warmup_ended", "step": 4, "frozen_at": 3}
    ]
    assert set(read_lines(tmp_path, "train")[-1]) == {"kind", "step", "loss", "step_ms", "input_ms"}


def test_a_resumed_run_says_it_only_if_it_comes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, 0, 4, [0, 0, 3, 3])
    capsys.readouterr()
    assert record(tmp_path, 4, 6, [3, 3], before=3) == 3  # The line of step 3 is kept.
    assert "warm-up" not in capsys.readouterr().err
    assert [line["step"] for line in read_lines(tmp_path, "warmup_ended")] == [3]
    record(tmp_path, 2, 4, [3, 3])  # From a checkpoint before the end: dropped, and written again.
    assert LINE.format(3) in capsys.readouterr().err
    assert [line["step"] for line in read_lines(tmp_path, "warmup_ended")] == [3]


def test_other_processes_say_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics.jax, "process_index", lambda: 1)
    assert record(tmp_path, 0, 2, [0, 2]) == 2
    assert capsys.readouterr().err == "" and not list(tmp_path.iterdir())


def test_a_run(
    config: config_dict.ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = read_config("digits_one_bit_adam")
    for field in ("eval_every", "measure_steps", "checkpoint", "network", "data"):
        other[field] = config[field]
    other.optimizer.warmup_steps = config.optimizer.warmup_steps
    other.steps, other.sync.dense_steps, other.model.stages = 6, 3, (1,)
    summary = loop.train(other, tmp_path, 0.0)
    shown = capsys.readouterr()
    assert summary["frozen_at"] == 3
    assert json.loads(shown.out.splitlines()[-1])["frozen_at"] == 3
    assert "end of the optimizer's warm-up" in shown.out and "step 3" in shown.out
    assert shown.err.count(LINE.format(3)) == 1
    assert read_lines(tmp_path, "warmup_ended") == [
        {"kind": "warmup_ended", "step": 3, "frozen_at": 3}
    ]
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    other.checkpoint.resume = True  # From the fourth step.
    again = loop.train(other, tmp_path, 0.0)
    assert again["frozen_at"] == 3 and "warm-up has ended" not in capsys.readouterr().err
    assert [line["step"] for line in read_lines(tmp_path, "warmup_ended")] == [3]


def test_the_norm_of_residuals_in_16_bits_is_added_up_in_32() -> None:
    tx = jaxcomm.mean("data", "int8", error_feedback=True, residual_dtype="bfloat16")
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        state = tx.init({f"w{i}": jnp.zeros((8, 8)) for i in range(300)})
    ones = jax.tree.map(jnp.ones_like, state.residual)
    found = jax.jit(watched.residual_norm)(state._replace(residual=ones))["residual_norm"]
    assert float(found) == pytest.approx((300 * 64) ** 0.5, rel=1e-4)
