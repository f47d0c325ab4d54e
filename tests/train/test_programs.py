"""Dense steps have a program of their own where the config says which they are."""

import importlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import config_dict
from running import read_lines

import jaxcomm
from train import loop, programs, sync
from train.state import TrainState


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({}, None),
        ({"dense_steps": 0}, None),
        ({"dense_steps": 7}, 7),
        ({"dense_steps": 7, "every": 2}, None),  # counted in exchanges
        ({"method": "one_bit_adam"}, 30),  # 15 % of the run
        ({"method": "one_bit_adam", "dense_steps": 7}, 7),
        ({"method": "one_bit_adam", "dense_steps": 7, "variance_stability": 0.9}, None),
        ({"method": "mean", "dense_steps": 7, "variance_stability": 0.9}, 7),
    ],
)
def test_the_last_dense_step(fields: dict[str, Any], last: int | None) -> None:
    config = config_dict.create(**{"method": "mean", "every": 1, **fields})
    assert sync.last_dense(config, 200) == last


def test_the_share_of_dense_steps_is_the_librarys() -> None:
    module = importlib.import_module("jaxcomm.transforms.one_bit_adam")
    assert sync.DENSE_SHARE == module._DENSE_SHARE


def all_programs(monkeypatch: pytest.MonkeyPatch) -> list[programs.Programs]:
    """Those of all runs that follow."""
    found: list[programs.Programs] = []
    make = programs.Programs

    def spy(*args: Any) -> programs.Programs:
        found.append(make(*args))
        return found[-1]

    monkeypatch.setattr(programs, "Programs", spy)
    return found


@pytest.mark.parametrize(
    "method", ["mean", "sparse_mean", pytest.param("low_rank_mean", marks=pytest.mark.slow)]
)
def test_a_run_with_dense_steps(
    method: str, config: config_dict.ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the count in the state, also when it continues; no program has a conditional."""
    compiled = all_programs(monkeypatch)
    config.sync.method, config.sync.dense_steps = method, 2
    config.sync.codec, config.sync.error_feedback = "int8", True
    config.inspect.every, config.checkpoint.every, config.model.stages = 0, 1, (1,)
    told = loop.train(config, tmp_path / "told", 0.0)
    shutil.rmtree(tmp_path / "told" / "checkpoints" / str(config.steps))
    config.checkpoint.resume = True
    again = loop.train(config, tmp_path / "told", 0.0)
    config.checkpoint.resume = False
    monkeypatch.setattr(sync, "last_dense", lambda *_: None)
    counted = loop.train(config, tmp_path / "counted", 0.0)

    assert [set(x.by_kind) for x in compiled] == [{True, False}, {False}, {None}]
    reports = [jaxcomm.wire_report(x) for x in compiled[0].by_kind.values()]
    assert not any(c.branch for report in reports for c in report.collectives)
    np.testing.assert_allclose(told["test_loss"], counted["test_loss"], rtol=1e-4)
    assert again["test_loss"] == told["test_loss"]
    for run in ("told", "counted"):
        sent = [line["bytes_per_param"] for line in read_lines(tmp_path / run, "train")]
        assert sent[0] == sent[1] > 1.5 * sent[2] == 1.5 * sent[-1], sent
    assert told["bytes_per_param"] == sent[0]


def test_what_one_bit_adam_has_frozen_stays_so(
    config: config_dict.ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that continues longer has a larger share of dense steps, but has ended its own."""
    compiled = all_programs(monkeypatch)
    config.sync.method, config.optimizer.name = "one_bit_adam", "scale"
    config.inspect.every, config.optimizer.nesterov = 0, False
    config.optimizer.weight_decay, config.optimizer.learning_rate, config.steps = 0.0, 1e-5, 4
    loop.train(config, tmp_path, 0.0)
    config.checkpoint.resume, config.steps = True, 40
    summary = loop.train(config, tmp_path, 0.0)
    assert [set(x.by_kind) for x in compiled] == [{True, False}, {False}]
    assert summary["frozen_at"] == 1 < sync.last_dense(config.sync, 40) - 4
    sent = [line["bytes_per_param"] for line in read_lines(tmp_path, "train")]
    assert sent[0] > 2 * max(sent[1:])


def test_a_run_that_continues_behind_dense_steps_that_were_not_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both programs are there: the state may ask for a dense step behind the last one."""

    class Adam(NamedTuple):
        frozen_at: Any

    monkeypatch.setattr(sync, "last_dense", lambda *_: 2)
    said: list[Any] = []
    run: Any = SimpleNamespace(
        sync=config_dict.create(method="one_bit_adam"),
        compile=lambda now, **kw: said.append(kw) or kw["dense"],
    )
    now = [TrainState(jnp.int32(5), {}, Adam(jnp.int32(x))) for x in (0, 6)]
    compiled = programs.Programs(run, now[0], 9)
    assert [compiled.next(6, now[0]), compiled.next(7, now[1])] == [True, False]
    assert sorted(kw["dense"] for kw in said) == [False, True]


def test_steps_that_were_not_finite_do_not_count_as_dense_ones() -> None:
    """The state says so; it is asked until the variance is frozen."""

    class Adam(NamedTuple):
        frozen_at: Any

    compiled = object.__new__(programs.Programs)
    compiled._last_dense, compiled._asks_state, compiled._is_over = 2, True, False
    compiled.by_kind = {True: "dense", False: "bits"}
    frozen_at = [0, 0, 0, 2, 2]  # before each step; the first one was not finite
    states = [TrainState(jnp.int32(0), {}, Adam(jnp.int32(x))) for x in frozen_at]
    found = [compiled.next(i, state) for i, state in enumerate(states, start=1)]
    assert found == ["dense"] * 3 + ["bits"] * 2
