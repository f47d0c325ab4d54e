"""Factored Adam in numpy, with an exact exchange: sees the gradients of all devices at once.

Rows and columns: N. Shazeer and M. Stern, "Adafactor", ICML 2018, arXiv:1804.04235, algorithm 2;
the momentum as in 1-bit Adam, arXiv:2102.02888, algorithm 1, of gradients that are divided first.
"""

import numpy as np

F = np.float32


class FactoredAdam:
    """Training of one parameter."""

    def __init__(
        self, shape: tuple[int, ...], b1: float, b2: float, eps: float, nesterov: bool = False
    ):
        self.nesterov = nesterov
        self.b1, self.b2, self.eps, self.t = F(b1), F(b2), F(eps), 0
        self.m = np.zeros(shape, F)
        self.square = np.zeros(shape, F)  # decaying mean; of a matrix only its margins are used

    def root(self) -> np.ndarray:
        """What all devices divide by."""
        v = self.square / (1 - self.b2**self.t)
        if v.ndim < 2:
            return np.sqrt(v)
        rows, columns = v.mean(-1, keepdims=True), v.mean(-2, keepdims=True)
        mean = v.mean((-2, -1), keepdims=True)
        return np.sqrt(rows * columns / np.where(mean > 0, mean, 1))

    def step(self, grads: np.ndarray) -> np.ndarray:
        """The direction of one step on the gradients [N, ...] of all devices."""
        self.t += 1
        self.square = self.b2 * self.square + (1 - self.b2) * np.square(grads).mean(0)
        root, bound = self.root(), (1 - self.b2) ** -0.5
        known = root > 0
        u = np.clip(grads / np.where(known, root + self.eps, 1), -bound, bound) * known
        self.m = self.b1 * self.m + (1 - self.b1) * u.mean(0)
        if self.nesterov:  # as optax.adam(nesterov=True)
            ahead = self.b1 * self.m / (1 - self.b1 ** (self.t + 1))
            return -ahead - (1 - self.b1) * u.mean(0) / (1 - self.b1**self.t)
        return -self.m / (1 - self.b1**self.t)
