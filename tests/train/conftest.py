"""The digits prepared once, a tiny config, and the training program to start."""

import functools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ml_collections import config_dict

from jaxcomm import plan
from train import digits, predicting
from train.supervise import ASKED

sys.path.append(str(Path(__file__).parent))  # for `from running import ...`

import imagenet
from running import Program, read_config


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory that holds the digits."""
    path = tmp_path_factory.mktemp("data")
    digits.prepare(str(path))
    return str(path)


probed = functools.cache(plan.probe)


@pytest.fixture(autouse=True)
def one_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """What messages take here is measured once for all runs of this process that ask for it."""
    monkeypatch.setattr(plan, "probe", probed)


@pytest.fixture(autouse=True)
def short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run in this process predicts is timed briefly: it is no measurement."""
    monkeypatch.setattr(predicting, "ROW", 0.0)
    monkeypatch.setattr(predicting, "ROWS", 2)


@pytest.fixture
def handlers() -> Iterator[None]:
    """The launcher takes over signals, which this process wants back."""
    before = {number: signal.getsignal(number) for number in ASKED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def imagenet_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory that holds a data set like ImageNet."""
    path = tmp_path_factory.mktemp("imagenet")
    imagenet.prepare(str(path))
    return str(path)


@pytest.fixture
def config(data_dir: str) -> config_dict.ConfigDict:
    """The digits' ResNet, a few steps long, which measures as little as it can."""
    config = read_config("digits_resnet")
    config.data.data_dir = data_dir
    config.steps, config.optimizer.warmup_steps = 4, 3
    config.eval_every = 2
    config.checkpoint.every = 2
    config.measure_steps = 4
    config.network.gigabits = 1.0
    return config


@pytest.fixture
def program(data_dir: str) -> Iterator[Program]:
    """The training program; whatever of it still runs after a test is ended."""
    program = Program(data_dir)
    yield program
    for process in program.started:
        if process.poll() is None:
            process.terminate()  # The launcher ends its own processes.
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()
