"""What a run that ends at a bad moment has saved, and which run a restart continues."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ml_collections import config_dict
from running import read_lines

from train import loop, step
from train.errors import UserError


@pytest.fixture
def tiny(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """A run with a test and a checkpoint in every second of its four steps."""
    config.model.stages = (1,)
    return config


def test_a_run_that_is_killed_while_it_tests(
    tiny: config_dict.ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of the same step comes before the test, which the resumed run makes up for."""

    def killed(params: Any) -> dict[str, float]:
        del params
        while not (tmp_path / "checkpoints" / "2").exists():  # it is written meanwhile
            time.sleep(0.01)
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(step, "make_test", lambda *_: killed)
        with pytest.raises(InterruptedError):
            loop.train(tiny, tmp_path, 0.0)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    tiny.checkpoint.resume = True
    loop.train(tiny, tmp_path, 0.0)
    assert [line["step"] for line in read_lines(tmp_path, "test")] == [2, 4]


def test_a_restart_continues_its_own_run(tiny: config_dict.ConfigDict, tmp_path: Path) -> None:
    """Not that of another config, which the first start would have refused."""
    first = loop.train(tiny, tmp_path, 0.0)
    tiny.eval_every = 3  # changes nothing that is trained
    again = loop.train(tiny, tmp_path, 0.0, restarted=True)
    assert first is not None and again is not None
    assert again["test_loss"] == first["test_loss"]
    kept = json.loads((tmp_path / "config.json").read_text())
    del kept["sync"]["correct_every"]  # by a version of the program that did not have it
    (tmp_path / "config.json").write_text(json.dumps(kept))
    assert loop.train(tiny, tmp_path, 0.0, restarted=True) is not None
    tiny.seed = 7
    with pytest.raises(UserError, match=r"step 4, of a run with another config: seed=7 \(was 0\);"):
        loop.train(tiny, tmp_path, 0.0, restarted=True)
    tiny.checkpoint.resume = True
    assert loop.train(tiny, tmp_path, 0.0, restarted=True) is not None
