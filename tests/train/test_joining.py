"""How processes find each other, or say why they do not."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from running import ROOT

from processes import run_processes
from train import agreement, distributed
from train.distributed import ON_THIS_MACHINE, POD, STARTERS, await_port, join, own_devices
from train.errors import UserError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host:1", 2, None), "--coordinator, --num_processes and --process_id belong together"),
        (("host:1", 2, 2), "--process_id=2 is not one of --num_processes=2"),
        (("host", 2, 0), "--coordinator=host: expected host:port"),
        (("host:80000", 2, 0), "--coordinator=host:80000: expected host:port, with a port of 1 to"),
    ],
)
def test_joining(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        join(*arguments)


def test_a_name_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a pod it comes with its address."""
    with pytest.raises(UserError, match=r"cannot reach process 0 at no-such-host.invalid:1: .*"):
        await_port("no-such-host.invalid", 1, named=0.5)
    assert capsys.readouterr().err.count("waiting until no-such-host.invalid has an address") == 1


@pytest.mark.parametrize(
    ("own", "message"),
    [("127.0.1.1", "resolves to 127.0.1.1, where"), (None, "to nothing"), ("10.1.2.3", None)],
)
def test_a_name_that_others_do_not_find(
    own: str | None, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian and Ubuntu have it in /etc/hosts; on one machine it does no harm."""
    addresses = {"localhost": "127.0.0.1", socket.gethostname(): own}
    monkeypatch.setattr(distributed, "_own_address", addresses.get)
    monkeypatch.setattr(distributed, "has_gpus", lambda: False)
    distributed.check_own_name("localhost")
    if message is None:
        return distributed.check_own_name("192.0.2.1")
    with pytest.raises(UserError, match=message):
        distributed.check_own_name("192.0.2.1")
    monkeypatch.setattr(distributed, "has_gpus", lambda: True)  # their messages are not gloo's
    return distributed.check_own_name("192.0.2.1")


AGREEMENT = """
import platform
from pathlib import Path

import ml_collections
from train import agreement
from train.errors import UserError

config = ml_collections.ConfigDict({"data": {"data_dir": f"/{jax.process_index()}"}, "rate": 0.1})
config.hosts = ("a", None)
agreement.check_same(config)
for change in ({"rate": 0.1 * (1 + (jax.process_index() == 2))}, {str(jax.process_index() % 2): 1}):
    config.update(change)
    try:
        agreement.check_same(config)
    except UserError as error:
        print(error)

config = ml_collections.ConfigDict({"data": {"name": "digits"}})
patch = str(int(jax.process_index() == 1))
platform.python_version_tuple = lambda: ("3", "11", patch)
agreement.check_same(config)
config.data.name = "python_topics"
own = {"rows of train": "7", "end of train": patch}
agreement.SOURCES = ()
for check in (lambda: agreement.check_same(config), lambda: agreement.check_data(own)):
    try:
        check()
    except UserError as error:
        print(error)
platform.python_version_tuple = lambda: ("3", "11", "4")
agreement.SOURCES = (Path("{folder}") / patch,)
agreement.SOURCES[0].mkdir(exist_ok=True)
(agreement.SOURCES[0] / "a.py").write_text(f"x = {patch}")
agreement.check_flags({"workdir": True, "evaluate": False})
for check in (
    lambda: agreement.check_same(config),
    lambda: agreement.check_flags({"workdir": jax.process_index() != 2, "evaluate": False}),
):
    try:
        check()
    except UserError as error:
        print(error)
"""


@pytest.mark.multiprocess
def test_processes_with_another_config_are_named_in_all_of_them(tmp_path: Path) -> None:
    """But for where their data are; or with another Python, other data, or another checkout."""
    for finished in run_processes(3, AGREEMENT.replace("{folder}", str(tmp_path))):
        rate, fields, python, data, source, flags = finished.stdout.splitlines()
        assert rate.endswith("and process 2 has another rate than process 0")
        assert fields == "process 1 has other fields of the config than process 0"
        assert python.endswith("process 1 has another version of Python than process 0")
        assert "process 1 has another end of train than process 0; look at --config.data" in data
        assert source.endswith("process 1 has another source of jaxcomm or train than process 0")
        assert flags.endswith("either process 0 or process 2 was started without --workdir")


def test_the_digest_of_a_checkout(tmp_path: Path) -> None:
    """Every file counts, and its name."""
    digests = {agreement.source_digest(agreement.SOURCES)}
    (tmp_path / "below").mkdir()
    for name, text in (("a.py", "x"), ("a.py", "y"), ("below/b.py", ""), ("c.py", "x")):
        (tmp_path / name).write_text(text)
        digests.add(agreement.source_digest([tmp_path]))
    (tmp_path / "a.py").rename(tmp_path / "d.py")
    digests.add(agreement.source_digest([tmp_path]))
    assert len(digests) == 6
    (tmp_path / "notes.txt").write_text("")
    assert agreement.source_digest([tmp_path]) in digests


DIRECTORIES = """
from pathlib import Path
import ml_collections
from train import agreement
from train.errors import UserError

agreement.PATIENCE = 0.5
config = ml_collections.ConfigDict()
agreement.check(config, Path("{folder}") / "new")
try:
    agreement.check(config, Path("{folder}") / str(jax.process_index() // 2))
except UserError as error:
    print(error)
"""


@pytest.mark.multiprocess
def test_a_directory_that_is_not_shared_is_named_in_all_processes(tmp_path: Path) -> None:
    for finished in run_processes(3, DIRECTORIES.format(folder=tmp_path)):
        error = finished.stdout
        assert "is not the same directory in all processes: process 2 does not see" in error
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_one_gpu_for_each_process_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "has_gpus", lambda: True)
    for name in ("JAX_LOCAL_DEVICE_IDS", "CUDA_VISIBLE_DEVICES", *sum(ON_THIS_MACHINE, ())):
        monkeypatch.delenv(name, raising=False)
    assert own_devices() is None
    monkeypatch.setenv("MPI_LOCALNRANKS", "4")
    monkeypatch.setenv("MPI_LOCALRANKID", "3")
    assert own_devices() == [3]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert own_devices() is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}, "process 2 of 4 .*--coord"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "process 0 of 2 that were started together"),
        ({"JOB_COMPLETION_INDEX": "3"}, "one of several pods.*--process_id=.JOB_COMPLETION_INDEX"),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
        ({}, None),
    ],
)
def test_one_of_several_processes_does_not_train_by_itself(
    names: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where jax finds no scheduler, as under Open MPI 5."""
    for name in (*(n for pair in STARTERS for n in pair), POD):
        monkeypatch.delenv(name, raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, value)

    def initialize(*arguments: object, **options: object) -> None:
        if not arguments:
            raise ValueError("coordinator_address should be defined.")
        joined.append(arguments)

    joined: list[object] = []
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    if message is None:
        return join(None, None, None)
    with pytest.raises(UserError, match=message):
        join(None, None, None)
    monkeypatch.setattr(distributed, "check_port", lambda port: None)
    monkeypatch.setattr(distributed, "await_port", lambda host, port: None)
    monkeypatch.setattr(distributed, "check_answer", lambda host, port: None)
    monkeypatch.setattr(distributed, "check_own_name", lambda host: None)
    if POD in names:
        return None
    join("host:1234", None, None)
    size, rank = map(int, names.values())
    assert joined == [("host:1234", size, rank)]
    return None


@pytest.mark.multiprocess
def test_processes_read_no_programs_out_of_a_folder() -> None:
    """XLA on CPU would lose the order of what they exchange; one process alone reads them."""
    script = """
        from train.distributed import compile_here

        compile_here()
        print(jax.config.jax_enable_compilation_cache)
    """
    for n, reads in ((1, "True"), (2, "False")):
        env = {"JAX_ENABLE_COMPILATION_CACHE": "true"}
        runs = run_processes(n, script, env=env)
        assert [run.stdout.splitlines()[-1] for run in runs] == [reads] * n


@pytest.mark.parametrize("started_by", ["flags", "SLURM"])
def test_a_process_that_never_comes(started_by: str) -> None:
    """jax would abort with a stack of C++."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    told = f"'127.0.0.1:{port}', 2, 0" if started_by == "flags" else "None, None, None"
    program = (
        "from train import distributed\n"
        "distributed.GIVE_UP_SECONDS = 1.0\n"
        f"distributed.join({told})"
    )
    job = {"JOB_ID": port, "STEP_NODELIST": "localhost", "NTASKS": 2, "PROCID": 0, "LOCALID": 0}
    slurm = {f"SLURM_{name}": str(value) for name, value in job.items()}
    env = os.environ | (slurm if started_by == "SLURM" else {})
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    which = f"the 2 processes of the run have connected to 127.0.0.1:{port}"
    if started_by == "SLURM":
        which = "the processes of the run have connected to the first one"
    assert line.startswith(f"error: not all of {which} within 1 s;")
