"""The sizes of buckets that the planner counts with."""

import inspect

import pytest

import jaxcomm
from jaxcomm.plan.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planner_counts_with_the_buckets_that_methods_have(family: str) -> None:
    about = FAMILIES[family]
    factory = getattr(jaxcomm, about.options["method"])
    assert about.bucket_mib == inspect.signature(factory).parameters["bucket_mib"].default
