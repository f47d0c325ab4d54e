"""Few cases in place of a full product."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Case = tuple[Any, ...]


def covering(cases: Iterable[Case], meeting: int) -> list[Case]:
    """Some of the cases, in which all meet that meet in any: every two values, with `meeting` 2.

    Greedy: the next case is the first of those that have most of what is missing.
    """
    have = {case: set(itertools.combinations(enumerate(case), meeting)) for case in cases}
    missing, chosen = set().union(*have.values()), []
    while missing:
        chosen.append(max(have, key=lambda case: len(have[case] & missing)))
        missing -= have[chosen[-1]]
    return chosen


def pairwise(*axes: Sequence[Any]) -> list[Case]:
    """Cases in which every two values of two axes meet, though not every three of three."""
    cases = covering(itertools.product(*(range(len(axis)) for axis in axes)), 2)
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in cases]


def every_pair(
    newest: bool = False,
    meeting: int = 2,
    possible: Callable[[Case], bool] = lambda case: True,
    **axes: Iterable[Any],
) -> pytest.MarkDecorator:
    """Parametrizes a test with the possible cases of a product, of which most are slow.

    Not slow are so many that every two values of two axes meet, or with `meeting` 1 that every
    value occurs. Of these so many are marked `newest`, if that is asked for, that every value
    occurs.
    """
    product = [case for case in itertools.product(*axes.values()) if possible(case)]
    pairs = covering(product, meeting)
    core = covering(pairs, 1) if newest else []

    def marks(case: Case) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow] * (case not in pairs) + [pytest.mark.newest] * (case in core)

    return pytest.mark.parametrize(
        tuple(axes), [pytest.param(*case, marks=marks(case)) for case in product]
    )
