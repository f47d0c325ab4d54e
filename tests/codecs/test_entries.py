"""Lists of values and offsets: 6 bytes an entry, however long the vector is."""

import jax
import numpy as np
import pytest

from jaxcomm.codecs.entries import Entries


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 2**16, 2**16 + 1, 5 * 2**16, 2**24 + 3])
@pytest.mark.parametrize("filled", [0, 1, 60, 64])
def test_round_trip_and_bytes(
    monkeypatch: pytest.MonkeyPatch, values: str, width: int, filled: int
) -> None:
    entries, slots, rng = Entries(values, width), 64, np.random.default_rng(width)
    filled = min(filled, width)
    offsets = np.full((3, slots), width, np.int32)
    x = np.zeros((3, slots), np.float32)
    for row in range(3):  # in the order of their blocks, and in any order within a block
        chosen = rng.choice(width, filled, replace=False)
        offsets[row, :filled] = chosen[np.argsort(chosen // 2**16, kind="stable")]
        x[row, :filled] = rng.standard_normal(filled)
    payload = jax.jit(entries.encode)(x, offsets)
    blocks = -(-width // 2**16) if width > 2**16 else 0
    assert payload.dtype == np.uint16
    assert 2 * payload.shape[1] == entries.bytes_of(slots)
    assert entries.bytes_of(slots) == {"float32": 6, "bfloat16": 4}[values] * slots + 4 * blocks
    got, places = jax.jit(entries.decode)(payload)
    np.testing.assert_array_equal(got, entries.rounded(x))
    np.testing.assert_array_equal(places, offsets)
    np.testing.assert_allclose(got, x, rtol=0 if values == "float32" else 2**-8)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    np.testing.assert_array_equal(jax.jit(lambda *a: entries.encode(*a))(x, offsets), payload)
    on_gpu = jax.jit(lambda payload: entries.decode(payload))(payload)
    jax.tree.map(np.testing.assert_array_equal, on_gpu, (got, places))


def test_a_value_that_rounds_to_zero_counts_in_its_block() -> None:
    """Its slot reads as empty, and those behind it keep their places."""
    entries, tiny = Entries("bfloat16", 2**18), np.float32(1e-45)
    x, offsets = np.float32([1, tiny, 2, 0]), np.int32([70_000, 70_001, 140_000, 2**18])
    got, places = entries.decode(entries.encode(x, offsets))
    np.testing.assert_array_equal(got, [1, 0, 2, 0])
    np.testing.assert_array_equal(places, [70_000, 2**18, 140_000, 2**18])
