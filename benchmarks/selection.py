"""How fast the largest entries are selected, beside a sum and `lax.top_k` in the same run.

    python -m benchmarks.selection [--millions=25.6] [--repeats=7]

Before anything is timed, every result is compared with numpy's, on random data that is new in every
run, at an odd length and at the length that is timed.

`x sum` is the time over that of summing the vector, the cheapest pass over it; `top_k /` is the
time of `lax.top_k(|x|, k)` over it.
"""

import argparse
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.arguments import count, hundredth
from jaxcomm.kernels import select

DENSITIES = (0.001, 0.01, 0.05)
ODD = 600_011  # not a multiple of the chunk


class Case(NamedTuple):
    name: str
    f: Callable[..., Any]
    args: tuple[Any, ...]
    check: Callable[[Any], None]
    repeats: int = 10**9  # at most


def reads(x: np.ndarray, on_device: jax.Array) -> Iterator[Case]:
    """The cheapest pass over the data, against which the rest is measured."""

    def close(total: jax.Array) -> None:
        np.testing.assert_allclose(total, x.sum(dtype=np.float64), atol=0.01 * x.size**0.5)

    yield Case("sum", jnp.sum, (on_device,), close)


def selections(x: np.ndarray, on_device: jax.Array, density: float) -> Iterator[Case]:
    """`top_k` comes first."""
    n, k = x.size, round(density * x.size)
    capacity = k + k // 4  # ties may select more than k
    magnitudes = np.abs(x)
    threshold = np.partition(magnitudes, n - k)[n - k]
    places = np.flatnonzero(magnitudes >= threshold)
    t = jnp.asarray(threshold)

    def is_threshold(found: jax.Array) -> None:
        assert found == threshold, (found, threshold)

    def is_top(found: Any) -> None:
        assert found[0][-1] == threshold

    def is_count(found: jax.Array) -> None:
        assert found == places.size

    def is_selected(found: select.Selected) -> None:
        indices, values = (np.asarray(a).reshape(-1) for a in (found.indices, found.values))
        filled = indices < n
        np.testing.assert_array_equal(np.sort(indices[filled]), places)
        np.testing.assert_array_equal(values[filled], x[indices[filled]])

    yield Case("top_k", lambda x: jax.lax.top_k(jnp.abs(x), k), (on_device,), is_top, 3)
    yield Case("threshold_for", lambda x: select.threshold_for(x, k), (on_device,), is_threshold)
    yield Case("count_at_least", select.count_at_least, (on_device, t), is_count)
    yield Case("compact", lambda x, t: select.compact(x, t, capacity), (on_device, t), is_selected)


class Timed:
    """A case, compiled and checked."""

    def __init__(self, case: Case):
        self.case = case
        self.call = jax.jit(case.f)
        self.seconds: list[float] = []
        case.check(self.call(*case.args))

    def run(self) -> None:
        if len(self.seconds) < self.case.repeats:
            start = time.perf_counter()
            jax.block_until_ready(self.call(*self.case.args))
            self.seconds.append(time.perf_counter() - start)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def checked(n: int, density: float, rng: np.random.Generator) -> list[Timed]:
    x = rng.standard_normal(n, np.float32)
    on_device = jnp.asarray(x)
    cases = [*reads(x, on_device), *selections(x, on_device, density)]
    return [Timed(case) for case in cases]


def table(timed: list[Timed]) -> str:
    total, top = timed[0].median, timed[1].median
    lines = [f"{'':20}{'ms':>10}{'best ms':>10}{'x sum':>10}{'top_k /':>10}"]
    lines += [
        f"{t.case.name:20}{1e3 * t.median:10.1f}{1e3 * min(t.seconds):10.1f}"
        f"{t.median / total:10.2f}{top / t.median:10.1f}"
        for t in timed
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="time selection")
    parser.add_argument("--millions", type=hundredth, default=25.6, help="entries of the vector")
    parser.add_argument("--repeats", type=count, default=7, help="rounds; medians are shown")
    args = parser.parse_args()
    rng = np.random.default_rng()
    n = round(args.millions * 1e6)
    device = jax.devices()[0].device_kind
    cores = len(os.sched_getaffinity(0))
    print(f"jax {importlib.metadata.version('jax')}, {device}, {cores} cores")
    print(
        f"{n:,} normal float32, medians of {args.repeats} alternating rounds (of top_k at most 3)"
    )
    checked(ODD, 0.01, rng)
    for density in DENSITIES:
        timed = checked(n, density, rng)
        for _ in range(args.repeats):  # all cases in turn, so that other load meets all of them
            for t in timed:
                t.run()
        print(f"\n{100 * density:g} % selected\n{table(timed)}")


if __name__ == "__main__":
    main()
