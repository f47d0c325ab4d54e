"""Several devices on one CPU, for experiments, notebooks and tests."""

import os
import re

import jax

from jaxcomm._numbers import is_integer

_COUNT_FLAG = r"\s*--xla_force_host_platform_device_count=\S*"


def simulate_devices(count: int) -> None:
    """Makes jax show this many CPU devices in this process, on any number of cores.

    Call it before anything runs on a device; to rehearse several processes of several devices, in
    each of them, before `jax.distributed.initialize`. It selects the CPU, sets the number of its
    devices, and gives XLA's thread pool two threads per device (by the environment variable NPROC,
    unless that is higher). By default the pool has one thread per core. With more devices than
    cores, a loop that runs ahead of its results can leave a device without a thread, and after a
    minute XLA aborts the process with "Expected 8 threads to join the rendezvous".

    Args:
      count: the number of devices.

    Raises:
      ValueError: if `count` is not a positive integer.
      RuntimeError: if jax has started its backend already.

    Example:
      >>> import jaxcomm
      >>> jaxcomm.simulate_devices(8)  # doctest: +SKIP
    """
    if not is_integer(count) or count < 1:
        raise ValueError(f"simulate_devices needs a positive number of devices, got {count!r}.")
    try:
        jax.config.update("jax_num_cpu_devices", int(count))
    except RuntimeError as error:
        raise RuntimeError(
            f"simulate_devices({count}) comes too late, as jax has started already: call it first, "
            "before any array is made; in a notebook, restart the kernel."
        ) from error
    jax.config.update("jax_platforms", "cpu")
    # jax refuses to be given the number twice.
    os.environ["XLA_FLAGS"] = re.sub(_COUNT_FLAG, "", os.environ.get("XLA_FLAGS", ""))
    os.environ["NPROC"] = str(max(2 * count, int(os.environ.get("NPROC") or 0)))
