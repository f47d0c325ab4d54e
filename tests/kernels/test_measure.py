"""`implementation="measure"` with operations that are slow or wrong on purpose."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.kernels import _implementations, _measure
from processes import run_processes

Calls = list[str]
SECONDS = {"slow": 0.02, "xla": 0.002}  # on a clock that only operations move; others take none


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """The implementations that the device ran, in order; an empty cache; and operations."""
    calls: Calls = []
    clock = SimpleNamespace(perf_counter=lambda: sum(SECONDS.get(name, 0) for name in calls))
    monkeypatch.setattr(_measure, "time", clock)
    monkeypatch.setenv("JAXCOMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_measure, "_chosen", {})
    for name in ("slow", "fast", "wrong", "broken", "absent"):
        names = ("xla", name) if name != "fast" else ("xla", "wrong", "fast")
        monkeypatch.setitem(_implementations.OPERATIONS, f"test.{name}", names)
    return calls


def operation(calls: Calls, name: str) -> Callable[..., jax.Array]:
    """x + 1 by an implementation that records its call."""

    def record(which: str, x: np.ndarray) -> np.ndarray:
        calls.append(which)
        return x

    def run(which: str, x: jax.Array) -> jax.Array:
        if which == "broken":
            raise ValueError("no such tile size")
        if which == "absent":
            raise NotImplementedError
        x = jax.pure_callback(lambda x: record(which, x), x, x, vmap_method="sequential")
        return jnp.where(x > 1, x, x + 1) if which == "wrong" else x + 1

    def call(x: jax.Array) -> jax.Array:
        return _implementations.call(f"test.{name}", "measure", run, (x,), elements=x.size)

    return call


def kept(tmp_path: Path) -> dict[str, str]:
    return json.loads((tmp_path / "implementations.json").read_text())


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="jaxcomm"):
        yield caplog


X = np.arange(300, dtype=np.float32)


@pytest.mark.newest
@pytest.mark.parametrize("wrapper", ["eager", "jit", "vmap"])
def test_the_faster_one_runs(wrapper: str, calls: Calls, log: pytest.LogCaptureFixture) -> None:
    wrap = {"eager": lambda f: f, "jit": jax.jit, "vmap": jax.vmap}[wrapper]
    x = X[None] if wrapper == "vmap" else X
    found = wrap(operation(calls, "slow"))(x)
    np.testing.assert_array_equal(found, x + 1)
    assert calls.count("slow") == _measure.REPEATS + 1  # never but to measure
    assert [r.levelname for r in log.records] == ["INFO"]
    assert "xla is chosen; medians of 7 calls: xla" in log.text
    calls.clear()
    found = wrap(operation(calls, "fast"))(x)
    np.testing.assert_array_equal(found, x + 1)
    assert calls[-1] == "fast"


def test_inside_shard_map(mesh8: jax.sharding.Mesh, calls: Calls) -> None:
    spec = jax.P("data")
    for check_vma in (True, False):
        f = jax.shard_map(
            operation(calls, "fast"), mesh=mesh8, in_specs=spec, out_specs=spec, check_vma=check_vma
        )
        x = np.arange(8 * 50 * (1 + check_vma), dtype=np.float32)
        np.testing.assert_array_equal(jax.jit(f)(x), x + 1)
        assert set(calls[-8:]) == {"fast"}
        calls.clear()


@pytest.mark.parametrize(("name", "level"), [("wrong", 1), ("broken", 1), ("absent", 0)])
def test_one_that_cannot_be_used_is_left_out(
    name: str, level: int, calls: Calls, log: pytest.LogCaptureFixture
) -> None:
    np.testing.assert_array_equal(jax.jit(operation(calls, name))(X), X + 1)
    assert calls[-1] == "xla"
    warnings = [record for record in log.records if record.levelname == "WARNING"]
    assert len(warnings) == level
    assert all(f"{name} is discarded" in record.getMessage() for record in warnings)


def test_equal_bits_are_demanded_but_of_nan() -> None:
    same = _measure._same_bits
    nan = np.uint32([0x7FC00000, 0xFFC00001, 0x3F800000]).view(np.float32)
    assert same(nan, np.float32([np.nan, np.nan, 1]))
    assert not same(nan, np.float32([np.nan, 1, 1]))
    assert not same(np.float32([0.0]), np.float32([-0.0]))
    assert not same(np.float32([1.0]), np.int32([0x3F800000]))
    assert not same(np.uint8([1, 2]), np.uint8([1]))
    assert same(np.float32(1), np.float32(1))


def test_a_choice_is_made_once_for_a_shape_class(calls: Calls, tmp_path: Path) -> None:
    f = operation(calls, "fast")
    f(X)
    (key,) = kept(tmp_path)
    assert key.startswith("test.fast | cpu | cpu | ") and key.endswith(" | float32[512] ()")
    assert kept(tmp_path) == {key: "fast"}
    for n in (257, 512):
        calls.clear()
        f(np.zeros(n, np.float32))
        assert calls == ["fast"]
    f(np.zeros(513, np.float32))
    f(np.zeros((3, 300), np.float32))
    assert len(kept(tmp_path)) == 3


def test_a_choice_is_read_from_the_file(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation(calls, "fast")(X)
    (key,) = kept(tmp_path)
    (tmp_path / "implementations.json").write_text(json.dumps({key: "xla", "other": "x"}))
    for choice, measured in (("xla", False), ("gone", True)):
        monkeypatch.setattr(_measure, "_chosen", {})
        (tmp_path / "implementations.json").write_text(json.dumps({key: choice, "other": "x"}))
        calls.clear()
        operation(calls, "fast")(X)
        assert (len(calls) > 1) == measured
    assert kept(tmp_path) == {key: "fast", "other": "x"}


@pytest.mark.parametrize("damage", ["{", "[1]", "\x00", None])
def test_a_damaged_file_is_not_fatal(damage: str | None, calls: Calls, tmp_path: Path) -> None:
    path = tmp_path / "implementations.json"
    if damage is None:
        path.mkdir()  # neither read nor replaced
    else:
        path.write_text(damage)
    np.testing.assert_array_equal(operation(calls, "fast")(X), X + 1)
    assert calls[-1] == "fast"
    if damage is not None:
        assert list(kept(tmp_path).values()) == ["fast"]


def test_a_folder_that_cannot_be_made_is_not_fatal(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXCOMM_CACHE_DIR", str(tmp_path / "file" / "folder"))
    operation(calls, "fast")(X)
    assert calls[-1] == "fast"


def test_random_arguments_are_like_the_given_ones() -> None:
    def shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = ((shape((3, 5), jnp.float32), shape((2000,), jnp.uint32)), None, key, shape((), "u1"))
    args = _measure.random_like(shapes, np.random.default_rng(0))
    for found, wanted in zip(jax.tree.leaves(args), jax.tree.leaves(shapes), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert int(args[0][1].max()) > 2**31 and len(np.unique(args[0][0])) == 15


@pytest.mark.multiprocess
def test_all_processes_take_the_choice_of_the_first(tmp_path: Path) -> None:
    """Which is slow with the other implementation in the second process."""
    script = """
        import json, os
        from types import SimpleNamespace
        import jax.numpy as jnp
        from jaxcomm.kernels import _implementations, _measure

        rank = jax.process_index()
        os.environ["JAXCOMM_CACHE_DIR"] += f"/{rank}"
        _implementations.OPERATIONS["test"] = ("xla", "other")

        clock = [0]
        _measure.time = SimpleNamespace(perf_counter=lambda: clock[0])

        def run(name, x):
            def wait(x):
                clock[0] += (name == "xla") == (rank == 0)
                return x
            return jax.pure_callback(wait, x, x)

        def f(x):
            return _implementations.call("test", "measure", run, (x,), elements=1)

        for n in (10, 10, 100):
            jax.jit(f)(jnp.zeros(n))
        print(json.dumps(sorted(_measure._chosen.values())))
        print(os.path.exists(_measure.cache_file()))
    """
    finished = run_processes(2, script, env={"JAXCOMM_CACHE_DIR": str(tmp_path)})
    for rank, process in enumerate(finished):
        assert '["other", "other"]' in process.stdout
        assert process.stdout.splitlines()[-1] == str(rank == 0)
