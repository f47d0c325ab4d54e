"""Max-min fair rates: their definition, on random networks, and textbook cases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max_min import fair_rates, finish_times


def incidence(paths: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(stream, link) for stream, path in enumerate(paths) for link in path]
    return np.asarray([s for s, _ in pairs]), np.asarray([k for _, k in pairs])


@pytest.mark.parametrize(
    ("paths", "capacities", "rates"),
    [
        ([[0], [0], [0, 1]], [3, 10], [1, 1, 1]),
        ([[0, 1], [0], [1]], [1, 2], [0.5, 0.5, 1.5]),  # a long stream beside two short ones
        ([[0, 1, 2], [0], [1], [2]], [4, 2, 6], [1, 3, 1, 5]),
        ([[0], [1]], [5, np.inf], [5, np.inf]),
    ],
)
def test_rates_of_small_networks(paths: list, capacities: list, rates: list) -> None:
    np.testing.assert_allclose(fair_rates(*incidence(paths), np.asarray(capacities)), rates)


def test_streams_end_one_after_the_other() -> None:
    """Both have half of the link until one ends; then the other has all of it."""
    ends = finish_times(*incidence([[0], [0], [1]]), np.asarray([2.0, np.inf]), np.array([1, 3, 9]))
    np.testing.assert_allclose(ends, [1, 2, 0])


PATHS = st.lists(
    st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), min_size=1, max_size=20
)


@given(PATHS, st.lists(st.integers(1, 20), min_size=8, max_size=8))
@settings(deadline=None, max_examples=100)
def test_nobody_can_be_faster_but_at_the_cost_of_somebody_slower(paths: list, rates: list) -> None:
    """Every stream passes a full link on which no stream is faster: the definition."""
    streams, links = incidence(paths)
    capacities = np.asarray(rates, float)
    found = fair_rates(streams, links, capacities)
    carried = np.bincount(links, found[streams], minlength=8)
    assert (carried <= capacities * (1 + 1e-9)).all()
    for stream, path in enumerate(paths):
        full = [k for k in path if carried[k] > capacities[k] * (1 - 1e-9)]
        assert any(found[stream] >= found[streams[links == k]].max() * (1 - 1e-9) for k in full)


@given(PATHS, st.lists(st.integers(1, 20), min_size=8, max_size=8))
@settings(deadline=None, max_examples=50)
def test_streams_of_one_size_end_when_the_busiest_link_is_through(paths: list, rates: list) -> None:
    """What the simulation of a step stands on."""
    streams, links = incidence(paths)
    capacities = np.asarray(rates, float)
    ends = finish_times(streams, links, capacities, np.full(len(paths), 6.0))
    busy = 6 * np.bincount(links, minlength=8) / capacities
    assert ends.max() == pytest.approx(busy.max())
    most = [busy[path].max() for path in paths]
    assert (ends <= np.asarray(most) * (1 + 1e-9)).all()
