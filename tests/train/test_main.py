"""Bad input: one clear line, an exit status that is not zero, and no hang."""

import errno
import json
import os
import queue
import re
import socket
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest
from absl import logging
from ml_collections import config_dict
from running import Program

from train import distributed, loop, signals
from train.distributed import (
    await_port,
    check_answer,
    schedule_as_batch,
)
from train.errors import RunError, UserError
from train.main import (
    end_where_a_write_fails,
    explained,
    give_simulated_devices_threads,
)
from train.workdir import claimed, keep_config, keep_data

CONFIG = "--config=configs/digits_resnet.py"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config=FILE is missing"),
        (["--config=no.py"], "--config: .*No such file or directory: 'no.py'"),
        (["--config=no.py", "--config.seed=1"], "--config: .*No such file or directory: 'no.py'"),
        (
            [CONFIG, "--config.optimizer.learnig_rate=1"],
            "the config has no field 'learnig_rate'. Did you mean \"learning_rate\" instead of .*",
        ),
        (
            [CONFIG, "--config.optimiser.name=sgd"],
            "the config has no field 'optimiser'. Did you mean \"optimizer\" instead of .*",
        ),
        ([CONFIG, "--config.qqq=1"], "the config has no field 'qqq'."),
        ([CONFIG, "--config.seed=-1"], "seed is -1; it must be a whole number from 0 to 42.*"),
        (["--config=LICENSE"], "--config: LICENSE, line 2: unexpected indent"),
        ([CONFIG, "--config.steps=many"], "flag --config.steps=many: invalid literal .*"),
        ([CONFIG, "--wrkdir=x"], "Unknown command line flag 'wrkdir'. Did you mean: workdir .*"),
        ([CONFIG, "x"], "not a flag: x"),
        ([CONFIG, "--config.checkpoint.resume=True"], "--config.checkpoint.resume=True needs .*"),
        ([CONFIG, "--restart=1"], "--restart=1 needs --workdir=DIR, the run.s folder"),
        ([CONFIG, "--evaluate"], "--evaluate needs --workdir=DIR, the run.s folder"),
        ([CONFIG, "--process_id=1"], "--coordinator, --num_processes and --process_id belong to.*"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flags(program: Program, arguments: list[str], message: str) -> None:
    done = program.run("train", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(f"error: {message}\n", done.stderr), done.stderr


def test_help_is_no_failure(program: Program) -> None:
    done = program.run("train", "--help")
    assert (done.returncode, done.stderr) == (0, "") and "--workdir" in done.stdout


def test_a_config_that_returns_nothing(program: Program, tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("def get_config(): return None\n")
    done = program.run("train", f"--config={tmp_path}/config.py")
    line = "error: --config: get_config() returns NoneType, not a ml_collections.ConfigDict\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.multiprocess
def test_a_mistake_after_the_start_is_one_line_too(program: Program, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    workdir = f"--workdir={tmp_path / 'file' / 'below'}"
    done = program.run("train.launch", "--processes=2", "--", CONFIG, workdir)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: cannot write to {workdir}: [Errno 20] Not a directory: '{tmp_path}/file/below'",
        "",
        "launch: process 0 failed with status 2; the others are ended",
    ]


def test_a_port_in_use(program: Program) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        where = f"--coordinator=localhost:{port}"
        done = program.run("train", CONFIG, where, "--num_processes=2", "--process_id=0")
    assert done.returncode == 2
    assert done.stderr == f"error: port {port} is in use; choose another\n"


@pytest.mark.skipif(distributed.has_gpus(), reason="processes with GPUs are left alone")
@pytest.mark.parametrize(
    ("before", "after"),
    [(os.SCHED_OTHER, os.SCHED_BATCH), (os.SCHED_IDLE, os.SCHED_IDLE)],
)
def test_threads_wait_for_their_turn_unless_the_user_said_otherwise(
    before: int, after: int
) -> None:
    found = []

    def schedule() -> None:
        os.sched_setscheduler(0, before, os.sched_param(0))
        schedule_as_batch()
        started_later = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
        started_later.start()
        started_later.join()

    thread = threading.Thread(target=schedule)  # A policy is of a thread.
    thread.start()
    thread.join()
    assert found == [after]


def test_process_0_does_not_come() -> None:
    with socket.socket() as unused:  # Bound, but nobody listens.
        unused.bind(("localhost", 0))
        port = unused.getsockname()[1]
        with pytest.raises(RunError, match=f"cannot reach process 0 at localhost:{port}"):
            await_port("localhost", port, seconds=0.3)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0", b""])
def test_something_else_answers(answer: bytes) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(answer)
            connection.recv(100)  # And then it waits for what the other side never says.

    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=serve)
        thread.start()
        says = re.escape(f"answers {answer[:9]!r}") if answer else "does not answer"
        with pytest.raises(UserError, match=f"localhost:{port} {says}, so it is not process 0"):
            check_answer("localhost", port, seconds=0.3)
        thread.join()


def test_what_exceptions_say() -> None:
    assert explained(UserError("a")) == (2, "a") and explained(RunError("b")) == (3, "b")
    for text in ("c", "INTERNAL: XLA's own", "UNAVAILABLE: a bucket: Connection reset by peer"):
        assert explained(ValueError(text)) == (1, None)
    lost = UserError("config.sync: UNKNOWN: Gloo AllGather failed")
    lost.__cause__ = ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    for status, line in (explained(lost), explained(lost.__cause__)):  # a restart may help
        assert status == 1 and line is not None and line.startswith("another process has ended")
    status, line = explained(OSError(errno.ENOSPC, "No space left on device"))
    assert status == 3 and line is not None and "the disk of --workdir is full" in line
    orbax = RuntimeError("in a thread")
    orbax.__cause__ = ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device")
    assert explained(orbax)[0] == 3


def test_threads_say_nothing_of_a_full_disk(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one line is the last, and not behind their tracebacks; other failures they tell of."""
    told: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))
    monkeypatch.setattr(signals, "end", lambda *_: None)
    monkeypatch.setattr(logging.get_absl_logger(), "filters", [])
    monkeypatch.setattr(sys, "unraisablehook", None)
    monkeypatch.setattr(sys, "__unraisablehook__", lambda args: told.append(type(args.exc_value)))
    end_where_a_write_fails()
    for error in (RuntimeError("Event loop is closed"), RuntimeError("a defect")):
        sys.unraisablehook(types.SimpleNamespace(exc_value=error))  # pyright: ignore
    assert told.pop() is RuntimeError and not told

    def fail(cause: Exception) -> None:
        try:
            raise ValueError("not written") from cause
        except ValueError:
            logging.exception("a thread failed")
            raise

    for cause in (OSError(errno.ENOSPC, "No space left on device"), KeyError("a defect")):
        thread = threading.Thread(target=fail, args=(cause,))
        thread.start()
        thread.join()
    assert told == [ValueError]
    (record,) = caplog.records
    assert (
        record.exc_info
        and record.exc_info[1]
        and isinstance(record.exc_info[1].__cause__, KeyError)
    )


@pytest.mark.parametrize(
    ("cause", "status", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 3, "the disk of --workdir is full"),
        (PermissionError(errno.EACCES, "Permission denied"), 1, "a checkpoint could not be"),
    ],
)
def test_a_run_ends_whose_main_thread_waits_for_a_failed_write(
    monkeypatch: pytest.MonkeyPatch, cause: OSError, status: int, says: str
) -> None:
    """With several processes orbax waits there for ever."""
    ended: queue.Queue[tuple[int, str]] = queue.Queue()
    monkeypatch.setattr(signals, "end", lambda *how: ended.put(how))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(logging.get_absl_logger(), "filters", [])
    end_where_a_write_fails(after=0.0)
    words = "[process=0] Failed to run 2 Handler Commit operations"
    for message in ["an attempt failed", words] if status == 1 else ["not written"]:
        assert ended.empty()
        try:
            raise cause
        except OSError:
            logging.error(message, exc_info=True)
    found, line = ended.get(timeout=10)
    assert found == status and line.startswith(f"\nerror: {says}")


def test_a_damaged_data_set() -> None:
    broken = RuntimeError("Corrupted Riegeli/records file: chunk header hash mismatch\nmore")
    status, line = explained(broken)
    assert status == 3 and line is not None and line.endswith("again: " + str(broken)[:-5])


def test_memory_that_is_not_there(config: config_dict.ConfigDict, tmp_path: Path) -> None:
    """More than a process can address, so that no machine gives it."""
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED: Out of memory") as step:
        jnp.zeros((2**24, 2**24), jnp.int8).block_until_ready()
    status, line = explained(step.value)
    assert status == 3 and line is not None and "raise --config.microbatches, or lower" in line
    assert explained(MemoryError("of numpy"))[0] == 3
    config.model.width = 2**21
    with pytest.raises(
        RunError, match="for the parameters .* make config.model smaller, such as its w"
    ):
        loop.train(config, tmp_path, 0.0)


def test_a_second_run_in_the_same_directory(tmp_path: Path) -> None:
    message = re.escape(f"another run (process {os.getpid()} on {socket.gethostname()}) writes to")
    with claimed(tmp_path):
        with pytest.raises(UserError, match=message), claimed(tmp_path):
            pass
    with claimed(tmp_path):
        pass


def test_a_run_that_is_refused_leaves_the_config_of_the_one_before(
    tmp_path: Path, config: config_dict.ConfigDict
) -> None:
    keep_config(tmp_path, config, resumed=False)
    before = (tmp_path / "config.json").read_text()
    config.seed, config.checkpoint.resume = 77, True
    with pytest.raises(UserError, match="there is no complete checkpoint"), claimed(tmp_path):
        loop.train(config, tmp_path, 0.0)
    assert (tmp_path / "config.json").read_text() == before


def test_a_run_that_goes_on_names_the_fields_that_changed(
    tmp_path: Path, config: config_dict.ConfigDict, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_config(tmp_path, config, resumed=True)  # Of the config before, nothing is known.
    config.eval_every, config.checkpoint.resume, config.sync.exempt = 99, True, ()
    keep_config(tmp_path, config, resumed=True)
    assert capsys.readouterr().err == ""
    config.seed, config.sync.codec, config.sync.exempt = 7, "float32", ("head/*",)
    keep_config(tmp_path, config, resumed=True)
    fields = "seed=7 (was 0), sync.codec='float32' (was 'bfloat16'), "
    fields += "sync.exempt=['head/*'] (was [])"
    assert capsys.readouterr().err == f"the run continues with another config: {fields}\n"
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 7


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoints"])
def test_something_else_where_a_run_writes(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch() if name == "checkpoints" else (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"{name} is no .*, as a run makes it; choose another"):
        claimed(tmp_path).__enter__()


def test_a_run_that_goes_on_names_the_data_that_changed(
    tmp_path: Path, config: config_dict.ConfigDict, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same name; where the config says that they are others, that is enough."""
    own = {"number of rows of train_split 'train'": "9", "end of train_split 'train'": "1"}
    other = {**own, "end of train_split 'train'": "2"}
    keep_config(tmp_path, config, resumed=False)
    for identity, resumed in ((own, True), (own, True), (other, False)):
        keep_data(tmp_path, config, identity, resumed)
    assert capsys.readouterr().err == ""
    keep_data(tmp_path, config, own, resumed=True)
    said = "the run continues with other data: another end of train_split 'train' than before; "
    assert capsys.readouterr().err == f"{said}look at --config.data.data_dir or TFDS_DATA_DIR\n"
    config.data.name = "mnist"
    keep_data(tmp_path, config, other, resumed=True)
    assert capsys.readouterr().err == ""


def change(name: str, value: object) -> Callable[[config_dict.ConfigDict], None]:
    def change_it(config: config_dict.ConfigDict) -> None:
        with config.ignore_type():
            config.update_from_flattened_dict({name: value})

    return change_it


def votes_by(algorithm: str) -> Callable[[config_dict.ConfigDict], None]:
    def change_both(config: config_dict.ConfigDict) -> None:
        config.sync.method, config.sync.algorithm = "majority_vote", algorithm

    return change_both


def of_rank_1000(config: config_dict.ConfigDict) -> None:
    config.sync.method, config.sync.rank = "low_rank_mean", 1000


def without_mean(config: config_dict.ConfigDict) -> None:
    with config.unlocked():
        del config.data.mean


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change("batch_size", 7), "batch_size 7 is not divisible by 8 devices"),
        (change("batch_size", 8000), "config.batch_size=8000 is more than the 14.. rows of digits"),
        (
            change("data.name", "cifar01"),
            "config.data.name: .* did you mean 'cifar10'",
        ),
        (change("model.name", "vti"), "config.model.name: there is no 'vti'; did you mean 'vit'"),
        (
            change("sync.method", "meen"),
            "config.sync.method: there is no 'meen'; did you mean 'mean'",
        ),
        (change("sync.codec", "cnatt"), "config.sync.codec: .* 'cnatt'; did you mean 'cnat'"),
        (change("sync.algorithm", "rung"), "config.sync.algorithm: .*; did you mean 'ring'"),
        (change("sync.algorithm", "oktopk"), "'oktopk'; it is one of native, .*, circulant$"),
        (votes_by("nativ"), "'nativ'; it is one of direct, ring, two_way_ring, .*, two_clusters$"),
        (
            change("optimizer.warmup_steps", 5),
            "warmup_steps=5 is more than config.steps=4: .*=0, or",
        ),
        (change("data.train_split", "trian[:9]"), "did you mean 'train'. its splits are .*test"),
        (change("data.test_split", "'test'"), "leave out the quotes around it. its splits are"),
        (of_rank_1000, "config.sync: rank 1000 compresses no parameter: .* Choose a lower rank."),
        (change("optimizer.name", "adam"), "config.optimizer.name: .*did you mean 'adamw'"),
        (change("checkpoint.resume", True), "checkpoint.resume: there is no complete checkpoint"),
        (change("checkpoint.every", 0), "checkpoint.every is 0; it must be a whole number"),
        (change("checkpoint.best", "loss"), "checkpoint.best is 'loss'; it must be test_loss or t"),
        (change("sync.exempt", (3,)), r"sync.exempt is \(3,\); it must be a tuple of patterns"),
        (change("data.mean", (1.0, 2.0, 3.0)), "data.mean has 3 values, and images of digits have"),
        (without_mean, "the config has no field data.mean, which images need: of the pixels"),
        (change("sync.exempt", ("hed/*",)), "config.sync.exempt: no parameter fits 'hed/.'; did"),
    ],
)
def test_configs(
    config: config_dict.ConfigDict,
    tmp_path: Path,
    spoil: Callable[[config_dict.ConfigDict], None],
    message: str,
) -> None:
    spoil(config)
    with pytest.raises(UserError, match=message):
        loop.train(config, tmp_path, 0.0)


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ("--xla_force_host_platform_device_count=8", None, "16"),
        ("--xla_force_host_platform_device_count=8", "40", "40"),
        ("", None, None),
    ],
)
def test_simulated_devices_get_threads(
    flags: str, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("NPROC", before or "")
    give_simulated_devices_threads()
    assert (os.environ["NPROC"] or None) == after
