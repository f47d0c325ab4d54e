"""Every example in a docstring of the library is run."""

import doctest
import importlib
import pkgutil

import pytest

import jaxcomm

MODULES = ["jaxcomm"] + [m.name for m in pkgutil.walk_packages(jaxcomm.__path__, "jaxcomm.")]
WITH_EXAMPLES = [
    "jaxcomm.collectives.all_reduce",
    "jaxcomm.explaining",
    "jaxcomm.gradients",
    "jaxcomm._marks",
    "jaxcomm.plan.choosing",
    "jaxcomm.plan.simulate",
    "jaxcomm.plan.using",
    "jaxcomm.simulation",
    "jaxcomm.transforms.control_variates",
    "jaxcomm.transforms.in_backward",
    "jaxcomm.transforms.local",
    "jaxcomm.transforms.local_steps",
    "jaxcomm.transforms.low_rank_mean",
    "jaxcomm.transforms.majority_vote",
    "jaxcomm.transforms.mean",
    "jaxcomm.transforms.multi_steps",
    "jaxcomm.transforms.factored_adam",
    "jaxcomm.transforms.one_bit_adam",
    "jaxcomm.transforms.per_device",
    "jaxcomm.transforms.resize_state",
    "jaxcomm.transforms.set_to_zero",
    "jaxcomm.transforms.shard",
    "jaxcomm.transforms.sharded",
    "jaxcomm.transforms.sparse_mean",
    "jaxcomm.transforms.stages",
    "jaxcomm.transforms.with_layer_axis",
    "jaxcomm.transforms.with_param_specs",
    "jaxcomm.wire",
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    assert (results.attempted > 0) == (name in WITH_EXAMPLES)
