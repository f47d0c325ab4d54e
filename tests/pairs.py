"""Few cases in place of a full product."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which every two values of two axes meet, though not every three of three.

    Greedy: the next case is the first of those that have most of the pairs that are missing.
    """

    def pairs(case: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    product = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing, cases = set().union(*map(pairs, product)), []
    while missing:
        cases.append(max(product, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(cases[-1])
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in cases]
