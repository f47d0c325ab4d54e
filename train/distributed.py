"""Joins the processes of a run, however they were started."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from train import signals
from train.errors import RunError, UserError

MAX_PORT = 65535
SAY_SECONDS = 30.0  # After this, a process says what it waits for.
GIVE_UP_SECONDS = 290.0  # After this, it ends; jax waits for 300.
# The opening of an HTTP/2 client, with settings that change nothing (RFC 9113, 3.4 and 6.5).
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
# Variables in which starters of processes say how many there are and which one this is, in all and
# on this machine: Open MPI, MPICH and Intel MPI, and PyTorch, which Kubeflow uses too.
STARTERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("WORLD_SIZE", "RANK"),
)
ON_THIS_MACHINE = (
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    ("LOCAL_WORLD_SIZE", "LOCAL_RANK"),
)
# The GPUs that a process sees, NVIDIA's and AMD's.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
POD = "JOB_COMPLETION_INDEX"  # a pod's number in an indexed Kubernetes job, without the total


def join(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the other processes that the arguments or a scheduler name.

    The three arguments go to `jax.distributed`. Without them it asks the scheduler (SLURM, Open MPI
    4). Without a scheduler, this is the only process. With only the coordinator, the numbers come
    from the environment, where the launcher of the processes has set them.

    Raises:
      UserError: if only some of the arguments are given, or none in one of several processes whose
        coordinator jax does not know; or if the coordinator's port is taken, or no program or
        another one answers there.
    """
    import jax

    schedule_as_batch()
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is for `train.signals`.
    if coordinator is None and num_processes is None and process_id is None:
        try:
            with _given_up("the processes of the run", "the first one"):
                jax.distributed.initialize()
        except (ValueError, RuntimeError) as error:
            check_alone()
            # Without a scheduler the error is "coordinator_address should be defined".
            if isinstance(error, RuntimeError) or "JAX_COORDINATOR_ADDRESS" in os.environ:
                raise UserError(f"jax cannot join the processes of the run: {error}") from error
        return
    if coordinator is not None and num_processes is None and process_id is None:
        num_processes, process_id = started_as(STARTERS) or (None, None)
    if coordinator is None or num_processes is None or process_id is None:
        raise UserError("--coordinator, --num_processes and --process_id belong together")
    if not 0 <= process_id < num_processes:
        raise UserError(f"--process_id={process_id} is not one of --num_processes={num_processes}")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= MAX_PORT:
        raise UserError(
            f"--coordinator={coordinator}: expected host:port, with a port of 1 to {MAX_PORT}"
        )
    host = host.strip("[]")  # of an IPv6 address
    if process_id == 0:
        check_port(int(port))
    else:
        await_port(host, int(port))
        check_answer(host, int(port))
        check_own_name(host)
    with _given_up(f"the {num_processes} processes of the run", coordinator):
        jax.distributed.initialize(
            coordinator, num_processes, process_id, local_device_ids=own_devices()
        )


@contextlib.contextmanager
def _given_up(processes: str, coordinator: str) -> Iterator[None]:
    """Says what this process waits for, and ends it if the others do not connect."""
    waiting = f"waiting for {processes} to connect to {coordinator}"
    given_up = f"error: not all of {processes} have connected to {coordinator} within "
    given_up += f"{GIVE_UP_SECONDS:g} s; check what the others print, and whether they can reach it"
    later = [
        threading.Timer(SAY_SECONDS, signals.say, (waiting,)),
        # jax would end the process a little later, with a C++ stack trace.
        threading.Timer(GIVE_UP_SECONDS, signals.end, (1, given_up)),
    ]
    for timer in later:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in later:
            timer.cancel()


def started_as(names: Sequence[tuple[str, str]]) -> tuple[int, int] | None:
    """How many processes were started together, and which one this is, if a starter says so."""
    for size, rank in names:
        number, own = os.environ.get(size, ""), os.environ.get(rank, "")
        if number.isdigit() and own.isdigit() and int(number) > 1:
            return int(number), int(own)
    return None


def check_alone() -> None:
    """Raises a UserError if this is one of several processes that would each train alone."""
    if (found := started_as(STARTERS)) is not None:
        raise UserError(
            f"this is process {found[1]} of {found[0]} that were started together, but the address "
            "of process 0 is unknown; add --coordinator=HOST:PORT, with its machine and a free port"
        )
    if (pod := os.environ.get(POD, "0")) != "0":
        raise UserError(
            f"{POD}={pod} is one of several pods, but the address of the first is unknown; add "
            f"--coordinator=HOST:PORT --num_processes=N --process_id=${POD}, or leave {POD} out of "
            "the environment (env -u) to train alone"
        )


def own_devices() -> list[int] | None:
    """The GPU of this one of several processes on a machine; None if it is chosen elsewhere."""
    found = started_as(ON_THIS_MACHINE)
    chosen = {"JAX_LOCAL_DEVICE_IDS", *VISIBLE} & os.environ.keys()
    return None if found is None or chosen or not has_gpus() else [found[1]]


def has_gpus() -> bool:
    """Whether this machine, or this container, has GPUs."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def check_own_name(coordinator: str) -> None:
    """Raises if processes on CPUs of other machines would look for this one on theirs.

    Gloo tells the others the first address of this machine's name that can be bound. On Debian and
    Ubuntu, a line in /etc/hosts makes that 127.0.1.1.
    """
    name = socket.gethostname()
    if has_gpus() or _own_address(coordinator):
        return
    own = _own_address(name)
    if own is None or own.startswith("127.") or own == "::1":
        raise UserError(
            f"the name of this machine, {name}, resolves to {own or 'nothing'}, where other "
            "machines cannot reach it; replace that by its address in /etc/hosts on every machine, "
            "including that of process 0"
        )


def _own_address(host: str) -> str | None:
    """The first address of a name that belongs to this machine, and so can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as bound, contextlib.suppress(OSError):
            bound.bind(address)
            return str(address[0])
    return None


def schedule_as_batch() -> None:
    """On Linux without a GPU, makes threads that wake up let running ones finish their turn.

    By default a thread that has waited for a message interrupts one that computes or sends on the
    same core. The interrupted thread may hold a lock, for which gloo then waits in a loop. A policy
    that the user has set is kept.
    """
    if not hasattr(os, "SCHED_BATCH") or has_gpus():
        return
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def compile_here() -> None:
    """Between CPU devices, keeps jax from loading programs from its cache folder.

    XLA on CPU loses the order of exchanges in conditionals and loops of loaded programs.
    """
    import jax

    if jax.device_count() > 1 and jax.default_backend() == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)


def check_port(port: int) -> None:
    """Raises if another program listens on a port of this machine: jax would wait for it."""
    if not 1 <= port <= MAX_PORT:
        raise UserError(f"port {port} is not one of 1 to {MAX_PORT}")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UserError(f"port {port} is in use; choose another") from error


def await_port(host: str, port: int, seconds: float = 300.0, named: float = 90.0) -> None:
    """Waits until process 0 listens; jax would wait as long, and then abort without a message.

    Args:
      host: the host of process 0.
      port: its port.
      seconds: how long to wait.
      named: how long a name may have no address; a pod gets one when it starts.
    """
    start, is_said = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OSError as error:
            is_unknown = isinstance(error, socket.gaierror)
            if time.monotonic() - start > (named if is_unknown else seconds):
                said = f"cannot reach process 0 at {host}:{port}: {error}"
                raise UserError(said) if is_unknown else RunError(said, status=1) from error
            if is_unknown and not is_said:
                print(f"waiting until {host} has an address: {error}", file=sys.stderr)
                is_said = True
        time.sleep(0.1)


def check_answer(host: str, port: int, seconds: float = 20.0) -> None:
    """Raises unless a gRPC server, as in process 0, listens there: jax would wait for minutes.

    A server of HTTP/2, on which gRPC is built, begins with its settings: a frame of type 4.
    """
    answer = b""
    try:
        with socket.create_connection((host, port), timeout=seconds) as connection:
            connection.settimeout(seconds)
            connection.sendall(HELLO)
            answer = connection.recv(9)
    except OSError:
        pass
    if answer[3:4] != b"\4":
        said = f"answers {answer!r}" if answer else "does not answer"
        raise UserError(
            f"{host}:{port} {said}, so it is not process 0 of a run: look at --coordinator"
        )
