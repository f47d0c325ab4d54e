"""1-bit Adam as published, in numpy: functions see the vectors of all devices at once.

H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed", ICML 2021, arXiv:2102.02888, algorithm 1, with a scale for each chunk.
"""

import numpy as np

F = np.float32


def compress(x: np.ndarray) -> np.ndarray:
    """Signs times the scale that keeps the L2 norm; the sign of zero is -1."""
    scale = np.sqrt(np.mean(np.square(x, dtype=np.float64))) if x.size else 0.0
    return (np.where(x > 0, 1, -1) * scale).astype(F)


def chunks(n: int, world: int) -> list[slice]:
    """What each device owns of a vector of n: as much as the first, as long as there is."""
    width = (n + world - 1) // world
    return [slice(min(r * width, n), min((r + 1) * width, n)) for r in range(world)]


def exchange(
    x: np.ndarray, worker: np.ndarray, server: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One exchange of x[N, n]: the mean [n] and the next errors [N, n] and [n].

    The server error of every owner stands at the coordinates that it owns.
    """
    world, n = x.shape
    mean, worker_next, server_next = np.zeros(n, F), np.zeros_like(worker), np.zeros_like(server)
    for chunk in chunks(n, world):
        arrived = []
        for device in range(world):
            corrected = x[device, chunk] + worker[device, chunk]
            arrived.append(compress(corrected))
            worker_next[device, chunk] = corrected - arrived[-1]
        corrected = sum(arrived, np.zeros_like(arrived[0])) / F(world) + server[chunk]
        mean[chunk] = compress(corrected)
        server_next[chunk] = corrected - mean[chunk]
    return mean, worker_next, server_next


class OneBitAdam:
    """Training of one flat vector that forms a bucket of its own, or that is exempt."""

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
            self.m, self.worker, self.server = exchange(local, self.worker, self.server)
        m = self.m / (1 - self.b1**self.t)
        v = self.v / (1 - self.b2 ** min(self.t, self.warmup))
        return -m / (np.sqrt(v) + self.eps)
