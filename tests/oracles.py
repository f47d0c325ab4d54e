"""What each method must compute, in numpy: functions see the blocks of all devices at once."""

import math
from collections.abc import Callable

import numpy as np

from jaxcomm.collectives.algorithms.circulant import best_skips, near_skips

# Of the last axis: leading axes are messages of their own.
Rounding = Callable[[np.ndarray], np.ndarray]


def round_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even on float32's bits: add half a unit, less one bit if even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32))


def round_float16(x: np.ndarray) -> np.ndarray:
    """IEEE 754 binary16, as numpy converts to it."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)


def round_float32(x: np.ndarray) -> np.ndarray:
    """Nothing to round."""
    return np.asarray(x, np.float32)


ROUNDING: dict[str, Rounding] = {
    "float32": round_float32,
    "bfloat16": round_bfloat16,
    "float16": round_float16,
}


def shared_exponent(x: np.ndarray, codec: str) -> np.ndarray:
    """The power of two by which all devices scale: N max|x| < 2^15 for float16, 1 for the rest."""
    if codec != "float16" or x.size == 0:
        return np.float32(1)
    world = len(x)
    _, above = np.frexp(np.abs(x).max())
    return np.float32(2.0 ** (15 - int(above) - math.ceil(math.log2(world))))


def cut(x: np.ndarray, blocks: int) -> np.ndarray:
    """(world, length) as (world, blocks, n), padded with zeros."""
    world, length = x.shape
    n = -(-length // blocks)
    return np.pad(x, ((0, 0), (0, blocks * n - length))).reshape(world, blocks, n)


def direct(x: np.ndarray, rounding: Rounding) -> np.ndarray:
    """Tang et al. 2021, section 5: round every value, add in float32, round the mean."""
    blocks = cut(x, len(x))
    total = np.zeros(blocks.shape[1:], np.float32)
    for row in blocks:
        total = total + rounding(row)
    return rounding(total * np.float32(1 / len(x))).reshape(-1)[: x.shape[1]]


def ring(x: np.ndarray, rounding: Rounding) -> np.ndarray:
    """Patarasuk and Yuan 2009: block b starts at device b + 1 and is rounded at every hop."""
    world = len(x)
    blocks = cut(x, world)
    done = []
    for b in range(world):
        total = blocks[(b + 1) % world, b]
        for hop in range(2, world + 1):
            total = blocks[(b + hop) % world, b] + rounding(total)
        done.append(rounding(total * np.float32(1 / world)))
    return np.concatenate(done)[: x.shape[1]]


def two_way_ring(x: np.ndarray, rounding: Rounding) -> np.ndarray:
    """Block b comes to device b from N//2 devices before it, and from the others behind it."""
    world = len(x)
    blocks = cut(x, world)
    done = []
    for b in range(world):
        total = blocks[b, b]
        for step, far in ((-1, world // 2), (1, (world - 1) // 2)):
            if far == 0:
                continue
            partial = blocks[(b + step * far) % world, b]
            for hop in range(far - 1, 0, -1):
                partial = blocks[(b + step * hop) % world, b] + rounding(partial)
            total = total + rounding(partial)
        done.append(rounding(total * np.float32(1 / world)))
    return np.concatenate(done)[: x.shape[1]]


def halving_doubling(x: np.ndarray, rounding: Rounding, order: str = "near_first") -> np.ndarray:
    """Rabenseifner 2004; a remainder of r devices folds first, 2e into 2e + 1 (Thakur et al.)."""
    world = len(x)
    q = int(math.log2(world))
    extra = world - 2**q
    blocks = cut(x, 2**q)
    folded = [blocks[2 * e + 1] + rounding(blocks[2 * e]) for e in range(extra)]
    values = np.array(folded + list(blocks[2 * extra :]))
    bits = range(q) if order == "near_first" else reversed(range(q))
    met = 0
    for bit in bits:
        met |= 1 << bit
        before = values.copy()
        for r in range(2**q):
            for b in range(2**q):
                if b & met == r & met:  # the half of the blocks that r keeps in this round
                    values[r, b] = before[r, b] + rounding(before[r ^ (1 << bit), b])
    done = [rounding(values[b, b] * np.float32(1 / world)) for b in range(2**q)]
    return np.concatenate(done)[: x.shape[1]]


def circulant(x: np.ndarray, rounding: Rounding) -> np.ndarray:
    """Traeff 2024, algorithm 1: R[i] of device r is block r + i; R[s..s'-1] goes to r + s.

    The skips are the library's, those that fall.
    """
    world = len(x)
    blocks = cut(x, world)
    held = np.array([[blocks[r, (r + i) % world] for i in range(world)] for r in range(world)])
    skips = best_skips(world)
    for previous, skip in zip((world, *skips), skips, strict=False):
        before = held.copy()
        for r in range(world):
            sent = before[(r - skip) % world, skip:previous]
            held[r, : previous - skip] = before[r, : previous - skip] + rounding(sent)
    done = [rounding(held[r, 0] * np.float32(1 / world)) for r in range(world)]
    return np.concatenate(done)[: x.shape[1]]


def near_circulant(x: np.ndarray, rounding: Rounding) -> np.ndarray:
    """Of the library's rising skips, each in turn takes away the offsets that need it.

    What is left can be reached by the later skips alone; all else is sent on by this one.
    """
    world = len(x)
    blocks = cut(x, world)
    held = np.array([[blocks[r, (r + o) % world] for o in range(world)] for r in range(world)])
    skips, left = near_skips(world), set(range(world))
    for number, skip in enumerate(skips):
        reached = {0}
        for later in reversed(skips[number + 1 :]):
            reached |= {o + later for o in reached if 0 < o + later < world}
        before = held.copy()
        for o in left - reached:
            for r in range(world):
                held[r, o - skip] = before[r, o - skip] + rounding(before[(r - skip) % world, o])
        left = reached
    done = [rounding(held[r, 0] * np.float32(1 / world)) for r in range(world)]
    return np.concatenate(done)[: x.shape[1]]


def aggregator(x: np.ndarray, rounding: Rounding) -> np.ndarray:
    """Bernstein et al. 2019: the device in the middle adds what the others send to its own."""
    middle = len(x) // 2
    total = x[middle]
    for r, row in enumerate(x):
        total = total if r == middle else total + rounding(row)
    return rounding(total * np.float32(1 / len(x)))


ALGORITHMS = {
    "direct": direct,
    "ring": ring,
    "two_way_ring": two_way_ring,
    "halving_doubling": halving_doubling,
    "circulant": near_circulant,
}


def mean(x: np.ndarray, codec: str, algorithm: str) -> np.ndarray:
    """What every device must end with, bit for bit, for x of shape (world, length)."""
    return scaled(ALGORITHMS[algorithm], x, codec)


def scaled(oracle: Callable[..., np.ndarray], x: np.ndarray, codec: str) -> np.ndarray:
    """An algorithm's mean, with all devices' vectors in the codec's range."""
    scale = shared_exponent(x, codec)
    return oracle(x * scale, ROUNDING[codec]) / scale


def bytes_sent(n: int, message: int, world: int) -> int:
    """Of a device in direct, ring and circulant: each value twice, but for its own block."""
    return 2 * (world - 1) * message * -(-n // world)


def majority(x: np.ndarray, tie: str, zero: str, shared: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Bernstein et al. 2019, algorithm 1, with every rule for ties and zeros.

    Args:
        x: (world, n), one row for each device.
        tie, zero: the rules.
        shared: bool[n], the coins that all devices share.
        own: bool[world, n], those of each device.
    """
    coins = np.where(own, 1, -1) if zero == "random" else np.zeros_like(own, int)
    votes = np.where(x == 0, coins, np.sign(x)).astype(int)
    total = votes.sum(0)
    tied = {
        "random": np.where(shared, 1, -1),
        "zero": 0,
        "positive": 1,
        "negative": -1,
    }[tie]
    decided = np.where(total == 0, tied, np.sign(total))
    return np.where((votes == 0).all(0), 0, decided).astype(np.float32)


def majority_bits(world: int, algorithm: str) -> float:
    """Bits per coordinate and device, of the votes and of the way back."""
    width = [math.ceil(math.log2(k + 1)) for k in range(world + 1)]
    back = (world - 1) / world
    if algorithm == "direct":
        return 2 * back
    if algorithm == "ring":
        return sum(width[1:world]) / world + back
    if algorithm == "two_way_ring":
        before, behind = width[1 : world // 2 + 1], width[1 : (world - 1) // 2 + 1]
        return sum(before + behind) / world + back
    assert algorithm == "halving_doubling" and world & (world - 1) == 0
    return sum(j / 2**j for j in range(1, world.bit_length())) + back
