"""1-bit Adam as published, in numpy: functions see the vectors of all devices at once.

H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed", ICML 2021, arXiv:2102.02888, algorithm 1, with a scale for each block of a leaf.
"""

import numpy as np

F = np.float32


def compress(x: np.ndarray) -> np.ndarray:
    """Signs times the scale that keeps the L2 norm; the sign of zero is -1."""
    scale = np.sqrt(np.mean(np.square(x, dtype=np.float64))) if x.size else 0.0
    return (np.where(x > 0, 1, -1) * scale).astype(F)


def blocks(sizes: list[int]) -> list[slice]:
    """The blocks of leaves that lie one behind the other: 1024 values, fewer at a leaf's end."""
    starts = np.cumsum([0, *sizes])
    return [
        slice(at, min(at + 1024, end))
        for start, end in zip(starts, starts[1:], strict=False)
        for at in range(start, end, 1024)
    ]


def exchange(
    x: np.ndarray, worker: np.ndarray, server: np.ndarray, sizes: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One exchange of x[N, n], leaves of these sizes: the mean [n], the next errors [N, n] and [n].

    The server error of every owner stands at the coordinates that it owns.
    """
    world, n = x.shape
    mean, worker_next, server_next = np.zeros(n, F), np.zeros_like(worker), np.zeros_like(server)
    for block in blocks(sizes):
        arrived = []
        for device in range(world):
            corrected = x[device, block] + worker[device, block]
            arrived.append(compress(corrected))
            worker_next[device, block] = corrected - arrived[-1]
        corrected = sum(arrived, np.zeros_like(arrived[0])) / F(world) + server[block]
        mean[block] = compress(corrected)
        server_next[block] = corrected - mean[block]
    return mean, worker_next, server_next


class OneBitAdam:
    """Training of one leaf, which may be exempt."""

    def __init__(self, world: int, n: int, warmup: int, exempt: bool = False, **options: float):
        self.b1, self.b2, self.eps = F(options["b1"]), F(options["b2"]), F(options["eps"])
        self.warmup, self.exempt, self.t = warmup, exempt, 0
        self.m, self.v = np.zeros(n, F), np.zeros(n, F)
        self.worker, self.server = np.zeros((world, n), F), np.zeros(n, F)

    def step(self, grads: np.ndarray) -> np.ndarray:
        """The direction of one step on the gradients [N, n] of all devices."""
        self.t += 1
        if self.t <= self.warmup:
            self.v = self.b2 * self.v + (1 - self.b2) * np.square(grads.mean(0))
        if self.t <= self.warmup or self.exempt:
            self.m = self.b1 * self.m + (1 - self.b1) * grads.mean(0)
        else:
            local = self.b1 * self.m + (1 - self.b1) * grads
            self.m, self.worker, self.server = exchange(
                local, self.worker, self.server, [self.m.size]
            )
        m = self.m / (1 - self.b1**self.t)
        v = self.v / (1 - self.b2 ** min(self.t, self.warmup))
        return -m / (np.sqrt(v) + self.eps)
