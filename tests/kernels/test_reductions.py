"""Reductions of the last axis, folded and plain, and running sums, against numpy."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.kernels import reductions

LENGTHS = [0, 1, 15, 16, 31, 63, 64, 100, 255, 256, 257, 512, 1000, 65_536, 70_001]
LEADING = [(), (3,), (2, 3), (2, 0), ()]
FOLDED = [
    (16, (1100,)),
    (33, (2, 300)),
    (64, (300,)),
    (100, (300,)),
    (256, (70,)),
    (70_001, (2, 3)),
]


@pytest.mark.newest
@pytest.mark.parametrize(("n", "lead"), [*zip(LENGTHS, 3 * LEADING, strict=True), *FOLDED])
def test_equals_numpy(n: int, lead: tuple[int, ...]) -> None:
    x = np.random.default_rng(n).standard_normal((*lead, n)).astype(np.float32)
    top, found = jax.jit(lambda x: (reductions.largest(x), reductions.total(x)))(x)
    np.testing.assert_array_equal(top, np.abs(x).max(-1, initial=0).view(np.uint32))
    assert found.dtype == jnp.float32
    magnitudes = np.abs(x, dtype=np.float64).sum(-1)
    assert (np.abs(found - x.sum(-1, dtype=np.float64)) <= 1e-6 * magnitudes).all()


@pytest.mark.newest
@pytest.mark.parametrize(
    ("shape", "axis"), [((n,), 0) for n in (1, 2, 3, 16, 17, 8192, 70_001)] + [((5, 33), 1)]
)
def test_running_sums(shape: tuple[int, ...], axis: int) -> None:
    x = np.random.default_rng(7).integers(-1000, 1000, shape, np.int32)
    found = jax.jit(lambda x: reductions.running_sum(x, axis))(x)
    np.testing.assert_array_equal(found, np.cumsum(x, axis, dtype=np.int32), strict=True)
    rows = jax.jit(jax.vmap(lambda x: reductions.running_sum(x, axis)))(np.stack([x, -x]))
    np.testing.assert_array_equal(rows[1], -np.asarray(found))
    if x.size * x.shape[axis] <= reductions._PAIRS:  # as GPUs do it
        each = jax.jit(lambda x: reductions._each_summed(x, axis))(x)
        np.testing.assert_array_equal(each, found, strict=True)


@pytest.mark.parametrize("place", [0, 255, 256, 300, 999])
@pytest.mark.parametrize("value", [-5.0, np.inf, -np.inf, np.nan, -np.nan])
def test_one_value_anywhere_is_found(place: int, value: float) -> None:
    x = np.random.default_rng(0).random(20_000).astype(np.float32)
    x[place] = value
    top = int(reductions.largest(jnp.asarray(x)))
    assert top == int(x[place].view(np.uint32)) & 0x7FFFFFFF
    assert np.isnan(value) == (top > 0x7F800000)


def test_denormals_are_not_zero() -> None:
    x = np.full(20_000, -(2.0**-149), np.float32)
    assert int(jax.jit(reductions.largest)(x)) == 1


@pytest.mark.parametrize("f", [reductions.largest, reductions.total])
def test_what_is_refused(f: Callable) -> None:
    for x in (jnp.zeros(3, jnp.int32), jnp.float32(1), jnp.zeros(3, jnp.bfloat16)):
        with pytest.raises(TypeError, match=f"{f.__name__} takes float32 with an axis"):
            f(x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(7,), (3, 5)])
def test_what_is_finite(dtype: jnp.dtype, shape: tuple[int, ...]) -> None:
    most = jnp.full(shape, jnp.finfo(dtype).max, dtype)
    assert reductions.all_finite([most, -most, jnp.zeros((0,), dtype)])
    for value in (jnp.inf, -jnp.inf, jnp.nan):
        assert not reductions.all_finite([most, most.at[-1].set(value)])


@pytest.mark.parametrize("shape", [(), (1,), (2500,), (3, 5), (3, 3, 7, 300)])
def test_gpus_find_what_is_finite_in_every_shape(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    others = [jnp.ones(4), jnp.ones((2, 2), jnp.bfloat16)]
    find = jax.jit(reductions._at_once)
    assert find(jnp.asarray(x), *others)
    for value in (np.inf, np.nan):
        x.reshape(-1)[-1] = value
        assert not find(jnp.asarray(x), *others)


@pytest.mark.parametrize("n", [1, 1024, 2500])
def test_parts_are_finite(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    x = jnp.full(n, -jnp.finfo(jnp.float32).max)
    for _ in ("own", "GPU"):
        assert reductions.finite_parts(x).all()
        for place in (0, n - 1):
            for value in (jnp.inf, -jnp.inf, jnp.nan):
                assert not reductions.finite_parts(x.at[place].set(value)).all()
        on_gpu = lambda *args, default, **_: default(*args)  # noqa: E731
        monkeypatch.setattr(jax.lax, "platform_dependent", on_gpu)


@pytest.mark.newest
@pytest.mark.parametrize("lead", [(), (2, 3)])
@pytest.mark.parametrize("m", [1, 2, 7, 8, 300])
def test_counts_up_to(monkeypatch: pytest.MonkeyPatch, m: int, lead: tuple[int, ...]) -> None:
    rng = np.random.default_rng(m)
    ascending = np.sort(rng.integers(-40, 40, (*lead, m), np.int32))
    x = rng.integers(-45, 45, (*lead, 50), np.int32)
    wanted = (ascending[..., None, :] <= x[..., None]).sum(-1)
    found = jax.jit(reductions.count_up_to)(ascending, x)
    np.testing.assert_array_equal(found, wanted)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    on_gpu = jax.jit(lambda *args: reductions.count_up_to(*args))(ascending, x)
    np.testing.assert_array_equal(on_gpu, wanted)


@pytest.mark.parametrize("rows", [1, 64, 65, 130])
def test_rows_are_added_in_their_order(rows: int) -> None:
    """Many of them in a loop, as those of many devices are."""
    x = np.random.default_rng(rows).standard_normal((rows, 100)).astype(np.float32)
    found = jax.jit(reductions.sum_in_order)(x)
    np.testing.assert_array_equal(found, functools.reduce(np.add, x))
