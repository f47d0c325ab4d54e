"""Joining the processes of a run, whoever started them."""

import socket
import time

from train.errors import UserError


def join(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the other processes that the arguments or a scheduler name.

    `jax.distributed` takes the three arguments. Without them it asks the scheduler (SLURM, Open
    MPI, Kubernetes). Without a scheduler, this is the only process.

    Raises:
      UserError: if only some of the arguments are given, or the coordinator's port is taken, or
        nobody answers there.
    """
    import jax

    if coordinator is None and num_processes is None and process_id is None:
        try:
            jax.distributed.initialize()
        except ValueError:  # "coordinator_address should be defined": there is no scheduler.
            pass
        return
    if coordinator is None or num_processes is None or process_id is None:
        raise UserError("--coordinator, --num_processes and --process_id belong together")
    if not 0 <= process_id < num_processes:
        raise UserError(f"--process_id={process_id} is not one of --num_processes={num_processes}")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--coordinator={coordinator}: expected host:port")
    if process_id == 0:
        check_port(int(port))
    else:
        await_port(host, int(port))
    jax.distributed.initialize(coordinator, num_processes, process_id)


def check_port(port: int) -> None:
    """Raises if another program listens on a port of this machine: jax would wait for it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UserError(f"port {port} is in use; choose another") from error


def await_port(host: str, port: int, seconds: float = 300.0) -> None:
    """Waits until process 0 listens; jax would wait as long, and then abort without a word."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OSError as error:
            if isinstance(error, socket.gaierror) or time.monotonic() > deadline:
                raise UserError(f"cannot reach process 0 at {host}:{port}: {error}") from error
        time.sleep(0.1)
