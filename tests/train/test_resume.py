"""A run that was killed goes on where its last checkpoint was, bit for bit."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from running import Program, checkpoint_bits, children, read_lines

STEPS = 40
EVERY = 5


def flags(workdir: Path, resume: bool) -> list[str]:
    return [
        "--config=configs/digits_resnet.py",
        f"--workdir={workdir}",
        f"--config.steps={STEPS}",
        "--config.eval_every=7",
        f"--config.checkpoint.every={EVERY}",
        f"--config.checkpoint.resume={resume}",
        "--config.measure_steps=4",
        "--config.network.gigabits=1",
    ]


def wait_for_step(workdir: Path, step: int) -> None:
    """Returns when a run has written the line of a step, and a checkpoint: it does so meanwhile."""
    deadline = time.monotonic() + 120
    while True:
        time.sleep(0.02)
        assert time.monotonic() < deadline, f"step {step} does not come"
        if (workdir / "metrics.jsonl").exists():
            try:
                lines = read_lines(workdir, "train")
            except ValueError:  # It is just writing a line.
                continue
            if lines and lines[-1]["step"] >= step and saved(workdir):
                return


def saved(workdir: Path) -> list[str]:
    """The steps of the checkpoints that are whole."""
    folder = workdir / "checkpoints"
    return (
        [path.name for path in folder.iterdir() if path.name.isdigit()] if folder.exists() else []
    )


def check_equal(whole: Path, killed: Path) -> None:
    expected, found = checkpoint_bits(whole, STEPS), checkpoint_bits(killed, STEPS)
    assert expected.keys() == found.keys() and len(expected) > 40
    assert [name for name in expected if expected[name] != found[name]] == []
    histories = [
        [(line["step"], line["loss"], line["accuracy"]) for line in read_lines(path, "train")]
        for path in (whole, killed)
    ]
    assert histories[0] == histories[1] and len(histories[0]) == STEPS


@pytest.mark.multiprocess
def test_one_process_with_four_devices(program: Program, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = program.run("train", *flags(whole, False), devices=4)
    assert done.returncode == 0, done.stderr
    step = int(np.random.default_rng().integers(EVERY + 1, STEPS - 4))
    victim = program.start("train", *flags(killed, False), devices=4)
    wait_for_step(killed, step)
    victim.kill()
    victim.wait()
    assert str(STEPS) not in saved(killed), f"killed too late, at {step}"
    resumed = program.run("train", *flags(killed, True), devices=4)
    assert resumed.returncode == 0, resumed.stderr
    check_equal(whole, killed)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_of_which_one_is_killed(program: Program, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    two = ["--processes=2", "--"]
    done = program.run("train.launch", *two, *flags(whole, False))
    assert done.returncode == 0, done.stderr
    launcher = program.start("train.launch", *two, *flags(killed, False))
    wait_for_step(killed, int(np.random.default_rng().integers(EVERY + 1, STEPS - 4)))
    os.kill(max(children(launcher.pid)), signal.SIGKILL)
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "failed with signal SIGKILL; the others are ended" in stderr
    resumed = program.run("train.launch", *two, *flags(killed, True))
    assert resumed.returncode == 0, resumed.stderr
    check_equal(whole, killed)
