"""`topk_chunks` against numpy, in chunks that do and do not divide a vector."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxcomm
import sparse_oracles
import sparse_table
from jaxcomm import sparse
from jaxcomm.codecs.chunk_entries import ChunkEntries
from jaxcomm.kernels import select
from jaxcomm.kernels.select import rows
from sparse_table import DENSITY, N, exchanged, normal


@pytest.mark.parametrize(
    ("world", "n", "chunk"),
    [(1, 1, 4096), (2, 300, 4096), (4, 4096, 4096), (5, 4096, 100), (3, 10_001, 1000), (8, 97, 32)],
)
def test_oracle_law_and_bytes(
    make_mesh: Callable[[int], Mesh], world: int, n: int, chunk: int
) -> None:
    x, algorithm = normal(world, n), sparse.topk_chunks(chunk)
    x[:, n // 2 : n // 2 + 40] = 0  # in the smallest chunks there is nothing else
    outcome, _ = exchanged(x, make_mesh(world), algorithm)
    k = max(1, round(DENSITY * min(n, chunk)))
    total, sent = sparse_oracles.topk_chunks(x, np.full(world, k), chunk)
    np.testing.assert_array_equal(outcome.taken, sent != 0)
    np.testing.assert_allclose(world * outcome.mean[0], total, rtol=2**-7, atol=1e-6)
    np.testing.assert_allclose(outcome.errors, x - sent, atol=2**-7 * np.abs(x).max())
    assert (outcome.selected == (sent != 0).sum(1)).all()
    assert (outcome.delivered == outcome.selected).all()
    assert (outcome.applied == (sent != 0).any(0).sum()).all()

    program = sparse_table.compiled(make_mesh(world), algorithm, n)
    algorithm = dataclasses.replace(algorithm, density=DENSITY)
    wanted = sparse_table.sent_by_chunks(algorithm, n, world)["all-gather"][0]
    report = jaxcomm.wire_report(program)
    assert sum(max(c.sent) for c in report.collectives if c.op == "all-gather") == wanted


def test_every_chunk_has_as_many(make_mesh: Callable[[int], Mesh]) -> None:
    """Also those of the smallest values."""
    x = normal(2, 2000)
    x[:, :1000] *= 1e-6
    outcome, _ = exchanged(x, make_mesh(2), sparse.topk_chunks(100))
    per_chunk = outcome.taken.reshape(2, 20, 100).sum(-1)
    assert (per_chunk == max(1, round(100 * DENSITY))).all()


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize(
    ("width", "k"),
    [(1, 1), (2, 1), (31, 31), (32, 31), (33, 17), (100, 7), (400, 1), (4096, 1365), (4096, 4096)],
)
@pytest.mark.parametrize("fill", ["none", "some", "all"])
def test_entries_arrive_as_they_are_sent(width: int, k: int, chunks: int, fill: str) -> None:
    rng = np.random.default_rng(width)
    places, values = np.full((chunks, k), width, np.int32), np.zeros((chunks, k), np.float32)
    for row in range(chunks):
        filled = {"none": 0, "some": rng.integers(k + 1), "all": k}[fill]
        places[row, :filled] = np.sort(rng.choice(width, filled, replace=False))
        values[row, :filled] = rng.standard_normal(filled)
    entries = ChunkEntries(width, k, chunks)
    codes = entries.codes(jnp.asarray(values))
    message = entries.encode(codes, jnp.asarray(places))
    got, arrived = (x[0] for x in entries.decode(message[None]))
    assert message.dtype == np.uint32 and message.shape == (entries.words,)
    np.testing.assert_array_equal(arrived, places)
    np.testing.assert_array_equal(got, entries.rounded(codes))
    there = places < width
    np.testing.assert_array_equal(np.sign(got)[there], np.sign(values)[there])
    assert np.abs(got).max(initial=0) <= 1.01 * np.abs(values).max(initial=0)


@pytest.mark.parametrize(
    ("density", "bits", "lost"), [(1 / 32, 9.25, 0.007), (1 / 64, 10.5, 0.005)]
)
def test_bits_of_an_entry_and_what_they_lose(density: float, bits: float, lost: float) -> None:
    x = jnp.asarray(normal(400, 4096))
    k = round(4096 * density)
    entries = ChunkEntries(4096, k, 400)
    assert 32 * entries.words / (400 * k) == bits
    columns = select.columns_of(select.largest_of_rows(x, k, 1e-30), 4096)
    values = jnp.take_along_axis(x, columns, axis=1)
    errors = values - entries.rounded(entries.codes(values))
    assert float(jnp.sum(errors**2) / jnp.sum(values**2)) < lost


def test_huge_values_are_sent(make_mesh: Callable[[int], Mesh]) -> None:
    """Their chunk has no magnitude that is 0 or infinite, and nothing else waits for them."""
    x = normal(2, N)
    x[0, 7:10], x[1, 12] = 1.5e38, -3e38
    outcome, _ = exchanged(x, make_mesh(2), sparse.topk_chunks())
    np.testing.assert_allclose(outcome.mean[0, [7, 9, 12]], [7.5e37, 7.5e37, -1.5e38], rtol=2**-7)
    assert outcome.taken.sum() == 2 * max(1, round(DENSITY * N))
    assert np.abs(outcome.errors).max() < 2e36


@pytest.mark.parametrize("k", [1, 7, 64, 100])
def test_largest_of_rows(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ties, zeros and values below the least, as CPUs and others find them."""
    x = np.round(4 * normal(9, 100)) / 4
    x[0], x[1, 10:], x[2] = 0, 0, np.where(x[2] > 0, 1e-30, x[2])
    x[3], x[4] = np.float32(3e38) * np.sign(x[3]), np.inf
    x[5] = np.where(np.arange(100) % 4 == 3, -2, 0.5)  # those that tie are listed first
    sizes = np.where(np.abs(x) >= 1e-3, np.abs(x), 0)

    def check(found: jax.Array) -> None:
        assert found.shape == (9, k)
        for row, places in zip(sizes, np.asarray(found), strict=True):
            there = places[places < 128]
            assert (np.diff(there) > 0).all() and (places[len(there) :] == 128).all()
            there = 4 * (there % 32) + there // 32  # by words of which there are four
            wanted = np.sort(row)[::-1][: len(there)]
            np.testing.assert_array_equal(np.sort(row[there])[::-1], wanted)
            assert len(there) == min(k, np.count_nonzero(row))

    check(select.largest_of_rows(jnp.asarray(x), k, 1e-3))
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    check(rows.largest_of_rows(jnp.asarray(x), k, 1e-3))


def test_long_rows() -> None:
    """The samples of some mislead."""
    x = np.concatenate([normal(50), normal(50) ** 5, np.eye(50, N, dtype=np.float32), normal(2)])
    x[-2, np.arange(N) % 512 < 64] *= 1e-6
    x[-1, np.arange(N) % 512 >= 64] *= 1e-6
    found = np.asarray(select.columns_of(rows.largest_of_rows(jnp.asarray(x), 64, 1e-30), N))
    for row, columns in zip(np.abs(x), found, strict=True):
        assert set(columns[columns < N]) == {i for i in np.argsort(-row)[:64] if row[i] >= 1e-30}


@pytest.mark.parametrize(
    ("x", "k", "error", "message"),
    [
        (jnp.ones((2, 3), jnp.bfloat16), 1, TypeError, "takes float32, got bfloat16"),
        (jnp.ones(3), 1, ValueError, r"takes a matrix and 1 <= k <= n, got \(3,\), k=1"),
        (jnp.ones((2, 3)), 4, ValueError, "k=4"),
        (jnp.ones((2, 3)), 0, ValueError, "k=0"),
    ],
)
def test_bad_rows(x: jax.Array, k: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        select.largest_of_rows(x, k, 1e-3)


@pytest.mark.parametrize("chunk", [0, -1, 64.0, "4096"])
def test_a_bad_chunk(chunk: object) -> None:
    with pytest.raises(ValueError, match="chunk must be a positive number of values, got"):
        sparse.topk_chunks(chunk)  # pyright: ignore
