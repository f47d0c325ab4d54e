"""What papers publish, for tables that show it beside what is measured."""

import math
from collections.abc import Callable

# The Ok-Topk paper (arXiv:2201.07598), table 1. Of n values, k of them selected, on N devices: the
# words of 4 bytes that a device receives at least and at most.
SPARSE_WORDS: dict[str, Callable[[int, int, int], tuple[float, float]]] = {
    "dense": lambda n, k, N: (2 * n * (N - 1) / N,) * 2,
    "topk_allgather": lambda n, k, N: (2 * k * (N - 1),) * 2,
    "topk_dsa": lambda n, k, N: (4 * k * (N - 1) / N, (2 * k + n) * (N - 1) / N),
    "gtopk": lambda n, k, N: (4 * k * math.log2(N),) * 2,
    "gaussiank": lambda n, k, N: (2 * k * (N - 1),) * 2,
    "oktopk": lambda n, k, N: (2 * k * (N - 1) / N, 6 * k * (N - 1) / N),
}


def sparse_volume(method: str, n: int, k: int, world: int) -> list[float]:
    """The least and the most, in entries of 8 bytes over k; once if they are equal."""
    volumes = (words / (2 * k) for words in SPARSE_WORDS[method](n, k, world))
    return list(dict.fromkeys(volumes))
