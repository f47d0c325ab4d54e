"""Packed codes against numpy, which packs bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.kernels.block_quantization import packing


def packed(x: np.ndarray, width: int) -> np.ndarray:
    """Each term of the width by itself, bit by bit, as the module's docstring says."""
    *lead, n = x.shape
    x = x.astype(int)
    parts, shift = [], 0
    for term in (8, 4, 2, 1):
        if not width & term:
            continue
        M = -(-n * term // 8)
        part = np.zeros((*lead, M), np.uint8)
        for i in range(n):
            stream, byte = divmod(i, M)
            part[..., byte] += (x[..., i] // 2**shift % 2**term * 2 ** (stream * term)).astype(
                np.uint8
            )
        parts.append(part)
        shift += term
    return np.concatenate(parts, -1)


@pytest.mark.parametrize(
    "n", [0, 1, 2, 3, 4, 5, 7, 8, 9, pytest.param(33, marks=pytest.mark.newest), 100]
)
def test_equals_the_oracle_and_comes_back(n: int) -> None:
    def there_and_back(x: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        found = [packing.pack(x, width) for width in range(1, 9)]
        return [(f, packing.unpack(f, n, width)) for width, f in enumerate(found, 1)]

    x = np.random.default_rng(n).integers(0, 256, (2, 3, n), dtype=np.uint8)
    for width, (found, back) in enumerate(jax.jit(there_and_back)(x), 1):
        np.testing.assert_array_equal(found, packed(x, width))
        assert found.shape[-1] == packing.bytes_for(n, width)
        np.testing.assert_array_equal(back, x.astype(int) % 2**width)


def test_whole_bytes_are_full() -> None:
    for width in range(1, 9):
        assert packing.bytes_for(800, width) == 100 * width


@pytest.mark.parametrize("width", [0, 9, -1])
def test_widths_are_one_to_eight(width: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 8 bits, got a width of {width}"):
        packing.pack(jnp.zeros(3, jnp.uint8), width)


def test_what_is_not_bytes_is_refused() -> None:
    with pytest.raises(TypeError, match="uint8, got int8"):
        packing.pack(jnp.zeros(3, jnp.int8), 4)
    with pytest.raises(TypeError, match="uint8, got uint32"):
        packing.unpack(jnp.zeros(3, jnp.uint32), 6, 4)
    with pytest.raises(ValueError, match="got a scalar"):
        packing.pack(jnp.uint8(3), 4)


@pytest.mark.parametrize("n", [5, 8, -1])
def test_bytes_that_do_not_fit_their_length(n: int) -> None:
    with pytest.raises(ValueError, match=f"^{n} codes of 4 bits .* pass the n and the width"):
        packing.unpack(jnp.zeros(2, jnp.uint8), n, 4)
