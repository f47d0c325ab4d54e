"""PowerSGD in numpy, float64, from the paper: all devices' matrices at once."""

import numpy as np


def step(
    matrices: np.ndarray, start: np.ndarray, residual: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vogels et al. 2019, algorithms 1 and 2, without the optimizer.

    Args:
      matrices: (world, n, m), the gradient of each device, outputs first.
      start: (m, r), Q of the last step.
      residual: (world, n, m).

    Returns:
      The update, the next Q, and the next residuals, as the paper has them: what a device sends
      less what all decompress.
    """
    sent = matrices + residual
    p, _ = np.linalg.qr((sent @ start).mean(0))
    q = np.mean([x.T @ p for x in sent], 0)
    update = p @ q.T
    return update, q, sent - update


def best(matrix: np.ndarray, rank: int) -> np.ndarray:
    """The nearest matrix of a rank."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * s[:rank] @ v[:rank]
