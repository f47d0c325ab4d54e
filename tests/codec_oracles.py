"""What each codec must decode to, in numpy: value by value, in float64, from the same words.

A word w of 32 random bits rounds up what lies by a fraction of at least 1 - w / 2^32 above the
value below it. The word of HALF rounds to nearest.
"""

import numpy as np

HALF = 2**31


def up(fraction: np.ndarray, words: np.ndarray | int) -> np.ndarray:
    """Whether to round up, where a fraction of the way to the value above is left over."""
    return np.asarray(words, np.float64) + np.floor(fraction * 2.0**32) >= 2.0**32


def power_of_two(x: np.ndarray, words: np.ndarray | int, lowest: int = -126) -> np.ndarray:
    """Horvath et al. 2019, definition 1; between 0 and 2^lowest it is one of these."""
    magnitude = np.abs(x.astype(np.float64))
    _, exponent = np.frexp(np.where(magnitude > 0, magnitude, 1))
    below = np.where(magnitude < 2.0**lowest, 0, np.ldexp(1.0, exponent - 1))
    above = np.maximum(np.ldexp(1.0, exponent), 2.0**lowest)
    above = np.where(below == 0, 2.0**lowest, above)
    rounded = np.where(up((magnitude - below) / (above - below), words), above, below)
    return (np.sign(x) * np.minimum(rounded, 2.0**127)).astype(np.float32)


def cnat_window(x: np.ndarray, words: np.ndarray | int) -> np.ndarray:
    """127 powers of two, down from the largest magnitude rounded up."""
    largest = float(np.abs(x).max(initial=0))
    if largest == 0:
        return np.zeros_like(x)
    fraction, exponent = np.frexp(largest)
    top = min(int(exponent) - (fraction == 0.5), 127)
    return power_of_two(x, words, max(top - 126, -126))


def cnat_fixed(x: np.ndarray, words: np.ndarray | int) -> np.ndarray:
    """2^-50 to 2^10."""
    return np.clip(power_of_two(x, words, -50), -(2.0**10), 2.0**10).astype(np.float32)


def blocks_of(x: np.ndarray, size: int) -> list[slice]:
    """The blocks of a message, the last of which may be short."""
    return [slice(start, start + size) for start in range(0, len(x), size)]


def unit_of(scale: float, most: float) -> np.float32:
    """A `most`-th of the scale, rounded up to 16 bits unless by three of 256 parts or less."""
    mantissa, exponent = np.frexp(np.float64(np.float32(scale) * np.float32(1 / most)))
    mantissa = np.floor(mantissa * 2.0**16 + 253 / 256)
    return np.float32(np.ldexp(mantissa, exponent - 16))


def uniform(x: np.ndarray, words: np.ndarray | int, scale: float, levels: int) -> np.ndarray:
    """The nearest multiples of a unit, or random ones."""
    unit = unit_of(scale, levels)
    y = np.minimum(np.abs(x / unit).astype(np.float64), levels)
    return np.sign(x) * ((np.floor(y) + up(y - np.floor(y), words)) * unit)


def blockwise(
    x: np.ndarray, words: np.ndarray | int, size: int, levels: int, norm: str
) -> np.ndarray:
    """Alistarh et al. 2017, section 3.1, and its kin: levels of a norm of each block."""
    out = np.zeros_like(x)
    for block in blocks_of(x, size):
        order = {"max": np.inf, "l2": 2}[norm]
        scale = float(np.linalg.norm(x[block].astype(np.float64), order))
        own = words if isinstance(words, int) else words[block]
        if scale > 0:
            out[block] = uniform(x[block], own, scale, levels)
    return out


def terngrad(x: np.ndarray, words: np.ndarray, size: int, clip: float | None) -> np.ndarray:
    """Wen et al. 2017, equations 1 to 3 and 8, by blocks; zeros are no part of the deviation."""
    x = x.copy()
    for block in blocks_of(x, size):
        present = x[block][x[block] != 0].astype(np.float64)
        if clip is not None and len(present):
            bound = np.float32(clip * np.sqrt(np.mean(present**2)))
            x[block] = np.clip(x[block], -bound, bound)
    return blockwise(x, words, size, 1, "max")


def scaled_sign(x: np.ndarray, size: int) -> np.ndarray:
    """Karimireddy et al. 2019, example 1, by blocks."""
    out = np.zeros_like(x)
    for block in blocks_of(x, size):
        scale = np.mean(np.abs(x[block].astype(np.float64)))
        out[block] = np.where(x[block] >= 0, 1, -1) * (unit_of(scale, 1) if scale > 0 else 0)
    return out


def int2(x: np.ndarray, size: int) -> np.ndarray:
    """Magnitudes 1, or 3 from the root mean square on, times the unit that fits them best."""
    out = np.zeros_like(x)
    for block in blocks_of(x, size):
        own = x[block].astype(np.float64)
        numbers = np.where(own >= 0, 1, -1) * np.where(own**2 >= np.mean(own**2), 3, 1)
        scale = 3 * (own @ numbers) / (numbers @ numbers)
        out[block] = numbers * (unit_of(scale, 3) if scale > 0 else 0)
    return out


def float8_values(exponent_bits: int, mantissa_bits: int, largest: float) -> np.ndarray:
    """All finite values of an 8-bit float that are not negative, in order."""
    bias = 2 ** (exponent_bits - 1) - 1
    codes = np.arange(128)
    field, mantissa = codes >> mantissa_bits, codes & (2**mantissa_bits - 1)
    values = np.where(
        field == 0,
        mantissa * 2.0 ** (1 - bias - mantissa_bits),
        (1 + mantissa / 2.0**mantissa_bits) * 2.0 ** (field - bias),
    )
    return values[values <= largest]


def fp8(x: np.ndarray, size: int, exponent_bits: int, largest: float) -> np.ndarray:
    """The nearest of all values of the format, ties to the one with an even code."""
    grid = float8_values(exponent_bits, 7 - exponent_bits, largest)
    out = np.zeros_like(x)
    for block in blocks_of(x, size):
        scale = np.abs(x[block]).max()
        if scale > 0:
            unit = unit_of(scale, largest)
            y = np.abs(x[block] / unit).astype(np.float64)
            high = np.clip(np.searchsorted(grid, y), 1, len(grid) - 1)
            down, rise = y - grid[high - 1], grid[high] - y
            even = np.where(high % 2 == 0, high, high - 1)
            nearest = np.where(down < rise, high - 1, np.where(rise < down, high, even))
            out[block] = np.sign(x[block]) * grid[nearest] * unit
    return out
