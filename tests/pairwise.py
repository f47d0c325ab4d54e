"""A few rows of a product in which every pair of values occurs, for tests of many dimensions."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Row = tuple[Any, ...]


def covering(rows: Iterable[Row], strength: int) -> list[Row]:
    """Some of the rows, with all that occurs together in `strength` columns of any; greedy."""
    left = {row: set(itertools.combinations(enumerate(row), strength)) for row in rows}
    missing = set().union(*left.values())
    chosen = []
    while missing:
        best = max(left, key=lambda row: len(left[row] & missing))
        missing -= left.pop(best)
        chosen.append(best)
    return chosen


def every_pair(
    newest: bool = False,
    possible: Callable[[Row], bool] = lambda row: True,
    **factors: Iterable[Any],
) -> pytest.MarkDecorator:
    """Parametrizes a test with the possible rows of the product of the factors.

    Every two values of two factors are together in a row; the other rows of the product are marked
    slow. With `newest`, so few rows that every value occurs are marked so.
    """
    product = [row for row in itertools.product(*factors.values()) if possible(row)]
    pairs = covering(product, min(2, len(factors)))
    core = covering(pairs, 1) if newest else []
    rows = [
        pytest.param(
            *row,
            marks=[pytest.mark.slow] * (row not in pairs) + [pytest.mark.newest] * (row in core),
        )
        for row in product
    ]
    return pytest.mark.parametrize(tuple(factors), rows)
