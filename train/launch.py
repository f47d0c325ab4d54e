"""Starts the processes of one machine: `python -m train.launch --processes=4 -- --config=...`.

Flags: --processes=N on this machine; --cluster=FILE, one of configs/cluster; --port=P of process 0,
by default a free one; --max_restarts=R, by default 0; --log_dir=DIR. The flags of `python -m train`
follow `--`.

Process 0 writes to this terminal, the others to files whose last lines are shown if they fail. The
files are DIR/1.log and so on, those of a restart DIR/restart1/1.log; without --log_dir they are
deleted at the end.

The first failure ends the others. With --max_restarts, all of them then start again from the last
checkpoint, up to R times; a mistake in the config or a full disk would only recur, so it ends the
run. SIGTERM makes the processes save and end, and the status is 0. Ctrl-C ends them immediately.
They never outlive this program.

Variables that must be set before jax starts come from a cluster file, and are printed. Processes
without a GPU also get settings of glibc that spare page faults. If a machine has several processes,
this program also tells them how to find each other. If it has one, the flags after `--` or the
scheduler do.
"""

import contextlib
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from train import streams
from train.distributed import STARTERS, VISIBLE, check_port, has_gpus, started_as
from train.errors import UserError, choose
from train.supervise import FINAL, Asked, supervise

TOGETHER = ("coordinator", "num_processes", "process_id")
NAMED = {"cluster": "file of configs/cluster", "log_dir": "folder"}


class Launch(NamedTuple):
    """What is to be started.

    Attributes:
      processes: the number of processes on this machine.
      port: the port of process 0; 0 for a free one at every start.
      max_restarts: how often all processes may be started again.
      log_dir: where the output of all processes but the first is kept; None deletes it.
      shown: the variables of the cluster file.
      settings: all variables; `{process_id}` in a value becomes the number of the process.
      arguments: the flags of `python -m train`.
    """

    processes: int
    port: int
    max_restarts: int
    log_dir: Path | None
    shown: dict[str, str]
    settings: dict[str, str]
    arguments: Sequence[str]


def main(argv: Sequence[str]) -> int:
    """Starts the processes and waits for them; returns the exit status."""
    try:
        if "--help" in argv[1:2]:
            print(__doc__)
            return 0
        launch = parse(argv)
    except (flags.Error, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, value in launch.shown.items():
        print(f"launch: {name}={value}", file=sys.stderr)
    environments = [
        # Not `format`: a value may be JSON.
        {name: value.replace("{process_id}", str(i)) for name, value in launch.settings.items()}
        for i in range(launch.processes)
    ]
    asked = Asked()
    for restart in range(launch.max_restarts + 1):
        port = launch.port or free_port()
        commands = commands_of(launch.processes, port, launch.arguments, restart)
        try:
            with log_folder(launch.log_dir, restart) as logs:
                names = names_of(launch.processes, launch.arguments)
                status = supervise(commands, environments, names, logs, asked)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if asked.signal or status in FINAL or restart == launch.max_restarts:
            return status
        print(
            f"launch: restart {restart + 1} of {launch.max_restarts} from the last checkpoint",
            file=sys.stderr,
        )
    raise AssertionError("the last start returns")


def parse(argv: Sequence[str]) -> Launch:
    """Reads the launcher's flags, which end at `--`.

    Raises:
      UserError, flags.Error: if they are invalid.
    """
    values = flags.FlagValues()  # Separate: what follows `--` belongs to train.main.
    flags.DEFINE_integer(
        "processes", None, "Processes on this machine.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_string("cluster", None, "A file of configs/cluster.", flag_values=values)
    flags.DEFINE_integer("port", 0, "Port of process 0; 0 finds a free one.", flag_values=values)
    flags.DEFINE_integer(
        "max_restarts", 0, "Starts after a failure.", lower_bound=0, flag_values=values
    )
    flags.DEFINE_string(
        "log_dir", None, "Keeps the output of all processes but the first.", flag_values=values
    )
    split = argv.index("--") if "--" in argv else len(argv)
    try:
        rest = values(list(argv[:split]))[1:]
    except flags.UnrecognizedFlagError as error:
        if "Did you mean" in str(error):  # one of these flags
            raise
        raise UserError(f"{error}; flags of the training program follow `--`") from error
    if rest:
        raise UserError(f"not a flag: {rest[0]}; flags of the training program follow `--`")
    for name, what in NAMED.items():
        if values[name].value == "":
            raise UserError(f"--{name} is empty; name a {what}, or leave it out")
    cluster = read_cluster(values.cluster) if values.cluster else {}
    processes = values.processes or cluster.get("processes")
    if not processes:
        raise UserError("--processes is missing")
    if values.port:
        check_port(values.port)
    arguments = argv[split + 1 :]
    if values.max_restarts and not _has_workdir(arguments):
        raise UserError("--max_restarts needs --workdir=DIR after `--`: a restart continues there")
    told = [a for a in arguments if a.lstrip("-").split("=")[0] in TOGETHER]
    if processes > 1 and told:
        raise UserError(
            f"{told[0]} does not go with --processes={processes}, which tells the processes of one "
            "machine how to find each other; leave out one of them"
        )
    shown = cluster.get("env", {})
    settings = {**memory_settings(shown), **shown}
    # On a machine with GPUs, one for each process; no effect on others.
    if processes > 1 and not any("{process_id}" in shown.get(name, "") for name in VISIBLE):
        settings = {"JAX_LOCAL_DEVICE_IDS": "{process_id}", **settings}
    logs = Path(values.log_dir) if values.log_dir else None
    return Launch(processes, values.port, values.max_restarts, logs, shown, settings, arguments)


def _has_workdir(arguments: Sequence[str]) -> bool:
    """Whether the flags of the training program name a folder."""
    named = [a.lstrip("-") for a in arguments if a.lstrip("-").split("=")[0] == "workdir"]
    return bool(named) and named[-1] != "workdir="  # the last one counts


@contextlib.contextmanager
def log_folder(log_dir: Path | None, restart: int) -> Iterator[Path]:
    """The folder of the processes' output; without `log_dir` it is deleted at the end.

    Raises:
      UserError: if it cannot be made.
    """
    if log_dir is None:
        with tempfile.TemporaryDirectory(prefix="jaxcomm-") as logs:
            yield Path(logs)
        return
    folder = log_dir / f"restart{restart}" if restart else log_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to --log_dir={log_dir}: {error}") from error
    yield folder


def memory_settings(shown: Mapping[str, str]) -> dict[str, str]:
    """How processes without a GPU keep the memory of a step for the next one.

    XLA's temporaries are larger than what glibc keeps by default, so in every step the kernel maps
    them afresh, page by page. What the user has set is kept, also in a cluster file (`shown`).
    """
    if has_gpus() or any(name.startswith("MALLOC_") for name in (*os.environ, *shown)):
        return {}
    return {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "MALLOC_TOP_PAD_": str(2**28),
    }


def read_cluster(path: str) -> dict:
    """Reads a cluster file: `processes` and `env`, whose values may hold `{process_id}`."""
    where = f"--cluster={path}"
    if not Path(path).is_file():
        raise UserError(f"{where}: there is no such file")
    try:
        found = runpy.run_path(path)["get_config"]()
    except KeyError as error:
        raise UserError(f"{where}: the file has no function {error}") from error
    except Exception as error:  # The file is the user's program.
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error
    cluster = found.to_dict() if hasattr(found, "to_dict") else found
    if not isinstance(cluster, dict):
        raise UserError(f"{where}: get_config() returns {cluster!r}, not a ConfigDict")
    for name in cluster:
        choose({"processes": 0, "env": 0}, name, where)
    processes, env = cluster.get("processes", 1), cluster.get("env", {})
    if not isinstance(processes, int) or processes < 1:
        raise UserError(f"{where}: processes is {processes!r}, not a whole number of at least 1")
    if not isinstance(env, dict) or not all(isinstance(v, str) for v in env.values()):
        raise UserError(f"{where}: env must map names to texts, and is {env!r}")
    if wrong := [name for name in env if not name or "=" in name]:
        raise UserError(f"{where}: env has the name {wrong[0]!r}; names are not empty, without =")
    return cluster


def commands_of(
    processes: int, port: int, arguments: Sequence[str], restart: int
) -> list[list[str]]:
    """The command line of each process."""
    command = [sys.executable, "-m", "train", *arguments]
    if restart:
        command.append(f"--restart={restart}")
    if processes == 1:
        return [command]
    together = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={processes}"]
    return [[*command, *together, f"--process_id={i}"] for i in range(processes)]


def names_of(processes: int, arguments: Sequence[str]) -> list[str]:
    """The names of the processes in messages: the number, and across machines the machine."""
    if processes > 1:
        return [str(i) for i in range(processes)]
    told = [a.partition("=")[2] for a in arguments if a.lstrip("-").startswith("process_id=")]
    found = started_as((*STARTERS, ("SLURM_NTASKS", "SLURM_PROCID")))
    number = told[-1] if told else str(found[1]) if found else None
    return ["0"] if number is None else [f"{number} on {socket.gethostname()}"]


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    streams.open_closed()
    streams.outlive_readers()
    sys.exit(main(sys.argv))
