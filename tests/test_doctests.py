"""Every example in a docstring of the library is run."""

import ast
import doctest
import importlib
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest

import jaxcomm

MODULES = ["jaxcomm"] + [m.name for m in pkgutil.walk_packages(jaxcomm.__path__, "jaxcomm.")]
WITH_EXAMPLES = [
    "jaxcomm._attached",
    "jaxcomm.collectives.all_reduce",
    "jaxcomm.compiling",
    "jaxcomm.explaining",
    "jaxcomm.gradients",
    "jaxcomm._marks",
    "jaxcomm.mesh",
    "jaxcomm.plan.choosing",
    "jaxcomm.plan.simulate",
    "jaxcomm.plan.using",
    "jaxcomm.simulation",
    "jaxcomm.transforms.control_variates",
    "jaxcomm.transforms.gather",
    "jaxcomm.transforms.in_backward",
    "jaxcomm.transforms.local",
    "jaxcomm.transforms.local_params",
    "jaxcomm.transforms.local_steps",
    "jaxcomm.transforms.low_rank_mean",
    "jaxcomm.transforms.majority_vote",
    "jaxcomm.transforms.mean",
    "jaxcomm.transforms.multi_steps",
    "jaxcomm.transforms.no_exchange",
    "jaxcomm.transforms.factored_adam",
    "jaxcomm.transforms.one_bit_adam",
    "jaxcomm.transforms.orthogonalize",
    "jaxcomm.transforms.per_device",
    "jaxcomm.transforms.resize_state",
    "jaxcomm.transforms.set_to_zero",
    "jaxcomm.transforms.shard",
    "jaxcomm.transforms.sharded",
    "jaxcomm.transforms.sharded_params",
    "jaxcomm.transforms.sparse_mean",
    "jaxcomm.transforms.stages",
    "jaxcomm.transforms.with_layer_axis",
    "jaxcomm.transforms.with_param_specs",
    "jaxcomm.wire",
]


PROMOTES = {"jaxcomm.transforms.local_steps"}  # optax.adam mixes dtypes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.standard_promotion] if name in PROMOTES else [])
        for name in MODULES
    ],
)
def test_docstrings(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    assert (results.attempted > 0) == (name in WITH_EXAMPLES)


def code_that_is_not_run(source: str) -> list[str]:
    """The paragraphs of docstrings that are Python, and have no prompt."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
            try:
                code = ast.parse(textwrap.dedent(paragraph))
            except SyntaxError:
                continue
            if any(isinstance(x, ast.Call | ast.FunctionDef | ast.Import) for x in ast.walk(code)):
                found.append(paragraph)
    return found


def test_code_in_docstrings_is_run() -> None:
    files = Path(jaxcomm.__file__).parent.rglob("*.py")
    assert [code for file in files for code in code_that_is_not_run(file.read_text())] == []
    text = 'def f():\n    """Does.\n\n    Like this:\n\n        x = f()\n\n    >>> f()\n    """\n'
    assert code_that_is_not_run(text) == ["    x = f()"]
