"""The fastest implementation of an operation, timed once and remembered.

`fastest` is called while a program is traced, when arguments have shapes but no values. So it times
the implementations on random data:

 1. A shape class says what a measurement holds for: the operation, the device kind, the version of
    jax, the dtype and shape of every argument, and the operation's static options. The last axis of
    each argument is rounded up to a power of two, so nearby sizes share a measurement.
 2. The choice for a class is looked up in memory, then in a file in the cache folder, which is
    `JAXCOMM_CACHE_DIR` or `~/.cache/jaxcomm`. A file that cannot be read or written is ignored.
 3. Otherwise the plain version and each other implementation run once. One whose results differ
    from the plain version's in any bit is discarded with a warning; all NaN count as equal. Of the
    others, the one with the smallest median time over several calls is chosen, and logged.

The timing runs in a separate thread. jax keeps its tracing context per thread, so the new thread
compiles and runs as if outside the surrounding jit, shard_map or vmap.

With several processes, all of them must trace the same program. Only process 0 reads the file and
measures; it broadcasts its choice to the others. All processes trace the same calls in the same
order, each in one thread, so either all of them find a class in memory or none does.
"""

import functools
import json
import logging
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _compat
from jaxcomm.kernels import _device

REPEATS = 7
_MARGIN = 0.95  # of the plain version's time, which XLA fuses with its neighbours

_log = logging.getLogger(__name__)
_chosen: dict[str, str] = {}
_one_at_a_time = threading.Lock()

Run = Callable[..., Any]
Sample = Callable[[np.random.Generator], tuple[Any, ...]]


def fastest(
    operation: str,
    names: Sequence[str],
    run: Run,
    args: tuple[Any, ...],
    static: tuple[Any, ...],
    sample: Sample | None,
) -> str:
    """The fastest implementation for arguments of the same shape class.

    Args:
      operation: its name.
      names: the implementations to choose from, the plain one first.
      run: takes the name of an implementation, then arguments.
      args: pytrees of arrays, of which only shapes and dtypes are used.
      static: the operation's other options.
      sample: makes arguments to time with; None means `random_like`.

    Returns:
      One of `names`: the choice of process 0, or the plain one on a device that lacks it.
    """
    device = _device.current()
    if len(names) == 1 and (jax.process_count() == 1 or device.platform == "cpu"):
        return names[0]
    key = " | ".join([operation, *_where(device), shape_class(args, static)])
    with _one_at_a_time:
        if key not in _chosen:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
            with ThreadPoolExecutor(1) as pool:
                decision = pool.submit(_decide, device, key, names, run, shapes, sample)
                _chosen[key] = decision.result()
        return _chosen[key]


def shape_class(args: tuple[Any, ...], static: tuple[Any, ...]) -> str:
    """Dtypes and shapes, the last axis rounded up to a power of two; then the static options."""

    def described(x: Any) -> str:
        *lead, n = x.shape or (1,)
        return f"{x.dtype}{[*lead, 1 << (n - 1).bit_length()] if x.shape else []}"

    return " ".join([*map(described, jax.tree.leaves(args)), str(static)])


def random_like(shapes: tuple[Any, ...], rng: np.random.Generator) -> tuple[Any, ...]:
    """Normal floats, uniform integers of all bits, and PRNG keys."""

    def one(x: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(int(rng.integers(2**31)))
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype)
        limits = jnp.iinfo(x.dtype)
        return jnp.asarray(rng.integers(limits.min, limits.max, x.shape, x.dtype, endpoint=True))

    return jax.tree.map(one, shapes)


def cache_file() -> Path:
    """Where choices are kept between runs."""
    folder = os.environ.get("JAXCOMM_CACHE_DIR") or Path.home() / ".cache" / "jaxcomm"
    return Path(folder) / "implementations.json"


def _where(device: Any) -> tuple[str, ...]:
    return device.platform, device.device_kind, ".".join(map(str, _compat.jax_version()))


def _decide(
    device: Any,
    key: str,
    names: Sequence[str],
    run: Run,
    shapes: tuple[Any, ...],
    sample: Sample | None,
) -> str:
    """The choice of process 0, in every process that has it."""
    choice = names[0]
    if jax.process_index() == 0:
        choice = _read().get(key, "")
    if choice not in names:
        try:
            with jax.default_device(device):
                choice = _timed(key, names, run, shapes, sample)
            _write(key, choice)
        except Exception:  # the other processes are waiting for a choice
            choice = names[0]
            _log.warning("%s: cannot be measured; %s runs", key, choice, exc_info=True)
    if jax.process_count() == 1:
        return choice
    from jax.experimental import multihost_utils

    letters = np.frombuffer(choice.encode().ljust(16), np.uint8)
    agreed = bytes(np.asarray(multihost_utils.broadcast_one_to_all(letters))).decode().strip()
    return agreed if agreed in names else names[0]


def _timed(
    key: str, names: Sequence[str], run: Run, shapes: tuple[Any, ...], sample: Sample | None
) -> str:
    """The fastest implementation among those that agree with the first."""
    rng = np.random.default_rng(0)
    args = random_like(shapes, rng) if sample is None else sample(rng)
    calls = {name: jax.jit(functools.partial(run, name)) for name in names}
    wanted = jax.block_until_ready(calls[names[0]](*args))
    for name in names[1:]:
        if not _agrees(key, name, calls[name], args, wanted):
            del calls[name]
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):  # in turn, so that other load affects all of them
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call(*args))
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    choice = min(medians, key=lambda name: medians[name])
    if medians[choice] > _MARGIN * medians[names[0]]:
        choice = names[0]
    shown = ", ".join(f"{name} {1e6 * median:.1f} us" for name, median in medians.items())
    _log.info("%s: %s is chosen; medians of %d calls: %s", key, choice, REPEATS, shown)
    return choice


def _agrees(key: str, name: str, call: Run, args: tuple[Any, ...], wanted: Any) -> bool:
    """Whether an implementation runs here and gives the wanted bits."""
    try:
        found = jax.block_until_ready(call(*args))
    except NotImplementedError:
        return False
    except Exception:  # for example one that does not compile; the plain version still works
        _log.warning("%s: %s is discarded, it fails", key, name, exc_info=True)
        return False
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    if all(_same_bits(np.asarray(a), np.asarray(b)) for a, b in pairs):
        return True
    _log.warning("%s: %s is discarded, its results differ from the plain version's", key, name)
    return False


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    unsigned = f"u{a.dtype.itemsize}"
    same = a.reshape(-1).view(unsigned) == b.reshape(-1).view(unsigned)
    if jnp.issubdtype(a.dtype, jnp.floating):
        same |= (np.isnan(a) & np.isnan(b)).reshape(-1)
    return bool(same.all())


def _read() -> dict[str, str]:
    """The choices in the cache file; none if it is missing or damaged."""
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        _log.warning("%s cannot be read and is ignored", cache_file(), exc_info=True)
        return {}
    return found if isinstance(found, dict) else {}


def _write(key: str, choice: str) -> None:
    """Adds a choice to the cache file, which other programs may be reading."""
    path = cache_file()
    text = json.dumps({**_read(), key: choice}, indent=1, sort_keys=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        _log.warning("%s cannot be written; the choice is not kept", path, exc_info=True)
