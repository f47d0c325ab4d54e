"""Reads the flags, joins the other processes, and reports why a run cannot continue."""

import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from train import check, signals, streams
from train.distributed import compile_here, join
from train.errors import (
    RunError,
    UserError,
    damaged_file,
    is_disk_full,
    is_out_of_memory,
    of_another_process,
)
from train.mistakes import mistake_in, mistake_in_traceback

# Seconds after a failed write: by then the main thread has raised the error, or waits forever.
STUCK_SECONDS = 5.0
_CLOSED = "Event loop is closed"
_PEER = re.compile(r"Gloo .*(closed|reset) by peer")  # not what XLA or a file system gets wrong
_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Output; by default a new folder in workdir/.")
_EVALUATE = flags.DEFINE_boolean(
    "evaluate", False, "Test the newest or best checkpoint of --workdir; train and write nothing."
)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
_RESTART = flags.DEFINE_integer(
    "restart", 0, "Set by train.launch: the number of this restart.", lower_bound=0
)


def main(argv: list[str]) -> None:
    """Parses, joins, trains or evaluates."""
    started = time.perf_counter()
    path = parse(argv)
    give_simulated_devices_threads()
    join(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    compile_here()
    # Imports take seconds; a mistyped flag is reported first.
    from train import agreement, evaluating, loop, workdir

    agreement.check_flags({"workdir": bool(_WORKDIR.value), "evaluate": _EVALUATE.value})
    folder = Path(_WORKDIR.value) if _WORKDIR.value else workdir.new(path.stem)
    if _EVALUATE.value:
        evaluating.evaluate(_CONFIG.value, folder)
        return
    with workdir.claimed(folder):
        try:
            loop.train(_CONFIG.value, folder, started, restarted=_RESTART.value > 0)
        except signals.StoppedError:
            signals.say("ended by SIGTERM")


def parse(argv: list[str]) -> Path:
    """Reads the flags and the config; returns the config's file."""
    app.define_help_flags()
    logging.set_verbosity(logging.ERROR)  # What ml_collections would warn of is reported below.
    try:
        rest = flags.FLAGS(argv)[1:]
        if rest:
            raise UserError(f"not a flag: {rest[0]}")
        if _CONFIG.value is None and not flags.FLAGS["config"].present:
            raise UserError("--config=FILE is missing")
        config: Any = _CONFIG.value  # Raises here if the file does not exist.
        check.fields(config)
        asked = {"config.checkpoint.resume=True": config.checkpoint.resume}
        asked |= {"evaluate": _EVALUATE.value, f"restart={_RESTART.value}": _RESTART.value}
        for flag, is_set in asked.items():
            if is_set and not _WORKDIR.value:
                raise UserError(f"--{flag} needs --workdir=DIR, the run's folder")
    except flags.Error as error:
        text = str(error).strip()
        raise UserError(mistake_in_traceback(text) if "Traceback" in text else text) from error
    except (UserError, KeyboardInterrupt):
        raise
    except SystemExit as end:  # absl ends --help with status 1
        is_help = any(word.lstrip("-").startswith("help") for word in argv)
        raise SystemExit(0 if is_help else end.code) from None
    except Exception as error:  # The config is the user's program.
        raise UserError(mistake_in(error)) from error
    return Path(config_flags.get_config_filename(flags.FLAGS["config"]))


def give_simulated_devices_threads() -> None:
    """Gives XLA's pool two threads for each CPU device that XLA_FLAGS asks for.

    With one thread for each core, XLA's default, evaluation runs ahead of its results until a
    device waits for a thread, and the process ends. `jaxcomm.simulate_devices` does the same for
    scripts.
    """
    devices = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    if devices:
        os.environ["NPROC"] = str(max(2 * int(devices[-1]), int(os.environ.get("NPROC") or 0)))


def run() -> None:
    """Runs `main`: a failure with a known reason becomes one line, a defect a traceback."""
    streams.outlive_readers()
    streams.keep_stdout()
    end_where_a_write_fails()
    try:
        main(sys.argv)
        return
    except Exception as error:
        status, line = explained(error)
        if line is None:
            traceback.print_exc()
        else:
            print(f"error: {line}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: there jax would wait for the other processes, which wait for this one.
    os._exit(status)


def end_where_a_write_fails(after: float = STUCK_SECONDS) -> None:
    """Ends the run if one of orbax's threads could not write, and says once that the disk is full.

    The main thread raises the error, unless it is waiting for a checkpoint: it then waits for that
    thread, which waits for other processes, which wait for the missing file. The tracebacks of a
    full disk are not shown, because the error becomes one line. Nor are those of TensorStore, for
    each of whose other writes the event loop is closed that waited for them.

    Args:
      after: seconds that the main thread has to raise it.
    """

    def is_other(error: BaseException | None) -> bool:
        return error is None or not is_disk_full(error)

    def look(record: Any) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Exception) and (
            is_disk_full(error) or "Failed to run" in record.getMessage()  # orbax's message
        ):
            status, line = explained(error)
            line = line or "a checkpoint could not be written, see above"
            later = threading.Timer(after, signals.end, (status, f"\nerror: {line}"))
            later.daemon = True
            later.start()
        return is_other(error)

    def tell(args: Any) -> None:
        if not (isinstance(args.exc_value, RuntimeError) and _CLOSED in str(args.exc_value)):
            sys.__unraisablehook__(args)

    sys.unraisablehook = tell
    usual = threading.excepthook
    logging.get_absl_logger().addFilter(look)
    threading.excepthook = lambda args: usual(args) if is_other(args.exc_value) else None


def explained(error: Exception) -> tuple[int, str | None]:
    """The exit status for an exception, and its line, or None if the reason is unknown.

    `train.errors` says what each status means.
    """
    if isinstance(error, UserError):
        if (line := of_another_process(error)) is not None:
            return 1, f"another process has ended or cannot be reached: {line}"
        return 2, str(error)
    if isinstance(error, RunError):
        return error.status, str(error)
    if is_out_of_memory(error):
        first = str(error).split("\n")[0]
        return 3, (
            "a device does not have enough memory: raise --config.microbatches, or lower "
            f"--config.batch_size ({first})"
        )
    if (file := damaged_file(error)) is not None:
        return 3, f"a file of the data set is damaged; prepare or copy the data set again: {file}"
    if is_disk_full(error):
        return 3, (
            "the disk of --workdir is full; complete checkpoints are unharmed: make room, and "
            "continue with --config.checkpoint.resume=True"
        )
    if (line := of_another_process(error)) is not None and _PEER.search(line):
        return 1, f"another process has ended or cannot be reached: {line}"
    return 1, None
