"""The best checkpoint is that of a run which nothing has interrupted."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from ml_collections import config_dict

from train import loop, report, step
from train.checkpoint import where_to_evaluate
from train.run import Run


def score(checkpoint: Path) -> Any:
    """What a checkpoint was tested with."""
    return json.loads((checkpoint / "metrics" / "metrics").read_text())


@pytest.mark.parametrize(
    ("losses", "stop", "kept"),
    [((3.0, 1.0, 2.0), 4, {4, 6}), ((1.0, 2.0, 3.0), 4, {2, 6}), ((3.0, 2.0, 1.0), 6, {6})],
    ids=["the best", "a worse one", "at the end"],
)
def test_sigterm_on_a_step_that_has_a_test(
    losses: tuple[float, ...],
    stop: int,
    kept: set[int],
    config: config_dict.ConfigDict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no time for the test then; the run that goes on adds it to the checkpoint."""
    batch, numbers, coming = Run.batch, itertools.count(1), iter(losses)

    def asked(run: Run, stop_now: bool) -> Any:
        # A step learns what was asked for in the step before.
        return batch(run, stop_now or next(numbers) == stop - 1)

    def test(params: Any) -> dict[str, float]:
        del params
        return {"test_loss": next(coming), "test_accuracy": 0.5}

    monkeypatch.setattr(Run, "batch", asked)
    monkeypatch.setattr(step, "make_test", lambda *_: test)
    monkeypatch.setattr(loop, "costs_of", lambda *_: {})
    monkeypatch.setattr(report, "show", lambda *_: None)
    config.model.stages, config.steps = (1,), 6
    config.checkpoint.best, config.checkpoint.every, config.checkpoint.keep = "test_loss", 100, 1
    assert loop.train(config, tmp_path, 0.0) is None
    folder = tmp_path / "checkpoints"
    assert max(int(path.name) for path in folder.iterdir()) == stop
    config.checkpoint.resume = True
    assert loop.train(config, tmp_path, 0.0) is not None
    assert {int(path.name) for path in folder.iterdir()} == kept
    assert where_to_evaluate(folder, "test_loss") == min(kept)
    assert {score(path)["test_loss"] for path in folder.iterdir()} == {
        losses[number // 2 - 1] for number in kept
    }
