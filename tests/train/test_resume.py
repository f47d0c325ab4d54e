"""A run that was killed goes on where its last checkpoint was, bit for bit."""

import os
import signal
import subprocess
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
        "--config.optimizer.warmup_steps=20",
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


def wait_for_restart(launcher: subprocess.Popen[str]) -> int:
    """The worker that the launcher has started again."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for pid in children(launcher.pid):
            try:
                if "--restart=1" in Path(f"/proc/{pid}/cmdline").read_text():
                    return pid
            except OSError:  # It has just ended.
                continue
        time.sleep(0.02)
    pytest.fail("the launcher does not start the run again")


@pytest.mark.multiprocess
def test_killed_restarted_stopped_damaged_and_resumed(program: Program, tmp_path: Path) -> None:
    """All that may befall one run; it ends as the one that nothing has befallen."""
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    unhurt = program.start("train", *flags(whole, False), devices=4)
    launch = ["--processes=1", "--max_restarts=1", "--"]
    launcher = program.start("train.launch", *launch, *flags(hurt, False), devices=4)
    wait_for_step(hurt, int(np.random.default_rng().integers(EVERY + 1, 20)))
    os.kill(children(launcher.pid)[0], signal.SIGKILL)
    wait_for_restart(launcher)
    wait_for_step(hurt, 25)
    launcher.send_signal(signal.SIGTERM)
    stdout, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, stderr
    assert "launch: process 0 failed with signal SIGKILL; the others are ended" in stderr
    assert "launch: restart 1 of 1 from the last checkpoint" in stderr
    stopped = int(stdout.split("stopped after step ")[1].split(",")[0])
    steps = sorted(int(step) for step in saved(hurt))
    assert steps[-1] == stopped < STEPS and read_lines(hurt, "train")[-1]["step"] <= stopped

    data = max((hurt / "checkpoints" / str(stopped)).glob("state/**/d/*"), key=os.path.getsize)
    os.truncate(data, data.stat().st_size // 2)
    resumed = program.run("train", *flags(hurt, True), devices=4)
    assert resumed.returncode == 0, resumed.stderr
    assert f"checkpoint {stopped} is damaged (state/" in resumed.stderr
    _, stderr = unhurt.communicate(timeout=100)
    assert unhurt.returncode == 0, stderr
    check_equal(whole, hurt)


@pytest.mark.multiprocess
def test_one_process_is_asked_to_end_while_all_measure(program: Program, tmp_path: Path) -> None:
    """All is saved; the others, which wait for its messages, end with it."""
    two = ["--processes=2", f"--log_dir={tmp_path}", "--"]
    short = ["--config.steps=2", "--config.optimizer.warmup_steps=1", "--config.eval_every=2"]
    long = ["--config.measure_steps=100000", "--config.model.stages=(1,)"]
    launcher = program.start("train.launch", *two, *flags(tmp_path, False), *short, *long)
    deadline = time.monotonic() + 120
    while not (tmp_path / "checkpoints" / "2").is_dir() or not read_lines(tmp_path, "split"):
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.1)
    time.sleep(1)
    os.kill(children(launcher.pid)[1], signal.SIGTERM)
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, stderr
    assert "ended by SIGTERM" in stderr and "Traceback" not in stderr
    assert read_lines(tmp_path, "summary") == []


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1500)
def test_another_number_of_devices(program: Program, tmp_path: Path) -> None:
    """4 -> 2 -> 3 -> 4 processes, 1-bit Adam and scaled signs: the loss goes on falling."""
    for name in ("digits_one_bit_adam", "digits_ef_sign"):
        workdir, losses = tmp_path / name, []
        for part, processes in enumerate((4, 2, 3, 4)):
            arguments = [
                f"--config=configs/{name}.py",
                f"--workdir={workdir}",
                f"--config.steps={60 * (part + 1)}",
                "--config.batch_size=48",
                f"--config.checkpoint.resume={part > 0}",
                "--config.measure_steps=4",
                "--config.network.gigabits=1",
            ]
            done = program.run("train.launch", f"--processes={processes}", "--", *arguments)
            assert done.returncode == 0, done.stderr
            lines = read_lines(workdir, "train")
            assert [line["step"] for line in lines] == list(range(1, 60 * (part + 1) + 1))
            losses.append(np.mean([line["loss"] for line in lines[-10:]]))
        assert losses == sorted(losses, reverse=True), losses


def kill(launcher: subprocess.Popen[str], start: set[int], wait: float, folder: Path) -> bool:
    """Kills a process of a start after a while, or when a checkpoint is written after it.

    Args:
      launcher: the launcher.
      start: the processes that it has started last.
      wait: seconds; for every second kill, the writing of a checkpoint is waited for.
      folder: of the checkpoints; a folder that does not exist waits for none.

    Returns:
      Whether a checkpoint was being written.
    """
    deadline = time.monotonic() + wait
    while launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    writing = False
    while launcher.poll() is None and folder.exists() and not writing:
        writing = any(folder.glob("*.orbax-checkpoint-tmp*"))
        time.sleep(0.001)  # A loop without it takes a core from the run; a write takes longer.
    if launcher.poll() is None:
        os.kill(max(start), signal.SIGKILL)
    return writing


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(7200)
def test_killed_at_random_moments(program: Program, tmp_path: Path) -> None:
    """Two processes; every second kill falls into the writing of a checkpoint.

    JAXCOMM_KILLS is the number of kills. A run that comes to its end is compared, and followed by
    another one, until there were as many. How fast the machine is may change all the time, and
    with it what a random moment is: the times to wait are drawn up to a bound that gets shorter
    when a start ends before its kill, and longer when a kill comes before a checkpoint. There is no
    time limit but pytest's, and restarts to spare: a machine that is busy enough makes processes
    think that their peers are dead.
    """
    kills = int(os.environ.get("JAXCOMM_KILLS", "6"))
    whole, rng, done, during, runs = tmp_path / "whole", np.random.default_rng(), 0, 0, 0
    two = ["--processes=2", f"--max_restarts={2 * kills}", "--"]
    started = time.monotonic()
    first = program.run("train.launch", *two, *flags(whole, False), timeout=None)
    assert first.returncode == 0, first.stderr
    seconds = time.monotonic() - started
    while done < kills:
        killed, before = tmp_path / f"killed{runs}", set[int]()
        launcher = program.start("train.launch", *two, *flags(killed, False))
        newest = 0
        while launcher.poll() is None and done < kills:
            start = set(children(launcher.pid)) - before
            if len(start) == 2:
                before |= start
                folder = killed / ("checkpoints" if done % 2 else "none")
                during += kill(launcher, start, rng.uniform(0, seconds), folder)
                done += launcher.poll() is None
                last, newest = newest, max(map(int, saved(killed)), default=0)
                seconds *= 0.7 if launcher.poll() is not None else 1.1 if newest == last else 1.0
            time.sleep(0.01)
        _, stderr = launcher.communicate()
        assert launcher.returncode == 0, stderr
        check_equal(whole, killed)
        print(f"{done} kills in {runs + 1} runs, {during} of them while a checkpoint was written")
        runs += 1
    assert during
