"""Eight simulated CPU devices, strict arithmetic and meshes for every test."""

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# For `from processes import run_processes`. Last, so that `train` stays the program, not its tests.
sys.path.append(str(Path(__file__).parent))

import compiled_programs

# Read when jax starts its backend, hence before it is imported. The tests of one machine often run
# beside each other on few cores, where a device may wait long for the others: be patient.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
        "--xla_cpu_collective_call_terminate_timeout_seconds=240",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The size of XLA's thread pool, as `jaxcomm.simulate_devices(8)` and `python -m train` set it, for
# the same reason. Tests that stand for a user take it away and see that those do.
os.environ.setdefault("NPROC", "16")
# numpy's and scikit-learn's own threads would only take the cores from the devices.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

# Most of the time goes into compiling, and many tests compile programs that others have compiled,
# in this process or another. They share the compiled programs, and the next run finds them too.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compiled_programs.folder()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Nobody looks up in which line of Python an operation was written; finding out takes time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax
import pytest
from jax.sharding import AxisType, Mesh

from jaxcomm import _cached_programs, _hosts

TESTS = Path(__file__).parent
MANY_BYTES = 3 * 2**30


def resident_bytes() -> float:
    """What this process has in memory; infinity where no /proc says it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return float("inf")


def give_back() -> None:
    """Gives free memory back to the system, which glibc keeps otherwise."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Mixed dtypes and ranks are errors, in the library; not in the training program's tests."""
    in_train = "train" in request.path.relative_to(TESTS).parts
    if in_train or request.node.get_closest_marker("standard_promotion"):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def programs_that_lose_their_order_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From the first exchange in a conditional or a loop on, what a test compiles is its own.

    Read back, such a program may crash. Users are told to do without the cache; here it is for all
    other tests. Processes of their own refuse such programs.
    """
    option = "jax_persistent_cache_min_compile_time_secs"
    usual = getattr(jax.config, option)

    def are_several() -> bool:
        jax.config.update(option, 1e9)
        return jax.process_count() > 1

    monkeypatch.setattr(_cached_programs, "are_several", are_several)
    yield
    jax.config.update(option, usual)


@pytest.fixture(autouse=True)
def no_mesh_left_behind() -> Iterator[None]:
    """Every test begins without a mesh; what it sets with `jax.set_mesh` ends with it."""
    with jax.set_mesh(None):
        yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Once, not in every worker."""
    if not hasattr(session.config, "workerinput"):
        compiled_programs.drop_old()


def pytest_collection_finish() -> None:
    """What is there now stays; looking through it for garbage would only take time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True, scope="module")
def memory_is_not_filled() -> Iterator[None]:
    """The small programs of jax.numpy serve the next file too; the large ones would pile up.

    What is free already is given back first: compiling all programs again takes much longer.
    """
    yield
    if resident_bytes() > MANY_BYTES:
        give_back()
    if resident_bytes() > MANY_BYTES:
        jax.clear_caches()
        give_back()


@pytest.fixture
def make_mesh() -> Callable[[int], Mesh]:
    """Returns a function from n to the mesh of the first n devices with one axis, "data"."""

    def make(n: int) -> Mesh:
        return jax.make_mesh((n,), ("data",), (AxisType.Auto,), devices=jax.devices()[:n])

    return make


@pytest.fixture
def mesh8(make_mesh: Callable[[int], Mesh]) -> Mesh:
    """All eight devices along "data"."""
    return make_mesh(8)


@pytest.fixture
def mesh4x2() -> Mesh:
    """Four devices along "data" times two along "model"."""
    return jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto, AxisType.Auto))


@pytest.fixture
def hosts_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Pretends that the simulated devices are on these hosts."""

    def pretend(*hosts: int) -> None:
        jax.clear_caches()
        monkeypatch.setattr(_hosts, "host_of", lambda device: hosts[device.id])

    yield pretend
    jax.clear_caches()
