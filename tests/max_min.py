"""Max-min fair rates: how streams share links, as TCP roughly does.

No stream's rate can rise without lowering that of a slower one. Progressive filling finds these
rates: all streams speed up alike until a link is full; its streams keep their rates, and the others
continue.

Streams and links are given as their incidence, two arrays of equal length as `Topology.routes`
returns them: entry i says that stream `streams[i]` passes link `links[i]`.

References:
  D. Bertsekas and R. Gallager, "Data Networks", 2nd edition, 1992, section 6.5.2.
"""

import numpy as np

_SLACK = 1e-12  # links whose shares differ by less are full at the same time


def fair_rates(streams: np.ndarray, links: np.ndarray, capacities: np.ndarray) -> np.ndarray:
    """The max-min fair rate of each stream, in the unit of the capacities.

    Args:
      streams: numbers of streams, 0, 1, ..., each at least once.
      links: the link that each passes, in an array of the same length.
      capacities: of all links; infinite for those without a limit.
    """
    from scipy import sparse  # here because importing it takes long

    number = int(streams.max(initial=-1)) + 1
    passes = sparse.csr_matrix(
        (np.ones(len(links)), (links, streams)), shape=(len(capacities), number)
    )
    rates, moving = np.zeros(number), np.ones(number, bool)
    level, left = 0.0, np.asarray(capacities, float).copy()
    while moving.any():
        count = passes @ moving
        used = np.flatnonzero(count)
        more = left[used] / count[used]
        step = more.min(initial=np.inf)
        if step == np.inf:
            rates[moving] = np.inf
            break
        level += step
        left[used] -= step * count[used]
        full = np.zeros(len(left), bool)
        full[used[more <= step + _SLACK * level]] = True
        stopped = moving & (passes.T @ full > 0)
        rates[stopped] = level
        moving &= ~stopped
    return rates


def finish_times(
    streams: np.ndarray, links: np.ndarray, capacities: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """When each stream ends, if all begin at 0 and share links max-min fairly at all times.

    Args:
      streams: see `fair_rates`.
      links: see `fair_rates`.
      capacities: see `fair_rates`; in units of size a second.
      sizes: how much each stream has to carry.
    """
    left, ends, now = np.asarray(sizes, float).copy(), np.zeros(len(sizes)), 0.0
    running = np.arange(len(sizes))
    while running.size:
        place = np.full(len(sizes), -1)
        place[running] = np.arange(running.size)
        on = place[streams] >= 0
        rates = fair_rates(place[streams[on]], links[on], capacities)
        limited = np.isfinite(rates)
        times = np.where(limited, left[running] / rates, 0.0)
        step = times.min()
        now += step
        done = times <= step * (1 + _SLACK)
        left[running[limited]] -= rates[limited] * step
        ends[running[done]] = now
        running = running[~done]
    return ends
