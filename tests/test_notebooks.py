"""Every notebook runs from its first cell to its last: small here, whole in `make notebooks`.

What a notebook trains has its sizes in a cell with the tag `parameters`. The small run sets smaller
ones behind it, compiles as the tests do, and leaves out the cells with the tag `full-size`: they
hold what is true of the full sizes only, such as accuracies. A whole run prints what is committed,
but for cells with the tag `timed`.
"""

import ast
import os
import re
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from processes import COMPILED_ANEW

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
SECONDS = 300
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")

SMALL: dict[str, dict[str, int]] = {
    "01_first_steps": {"STEPS": 10},
    "02_majority_vote": {"STEPS": 10},
    "03_quantizers": {"STEPS": 10, "LENGTH": 2**17},
    "04_sparse": {"STEPS": 20},
    "05_few_bits_with_adam": {"STEPS": 24},
}


def tagged(notebook: Any, tag: str) -> list[Any]:
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def shrink(notebook: Any, sizes: dict[str, int]) -> None:
    """Sets smaller parameters and leaves out what holds at the full sizes only."""
    found = set()
    for cell in tagged(notebook, "parameters"):
        targets = [t for node in ast.parse(cell.source).body for t in node.targets]
        found |= {target.id for target in targets}
        cell.source += "".join(f"\n{name} = {value}" for name, value in sizes.items())
    assert found == set(sizes)
    left_out = tagged(notebook, "full-size")
    assert not any(cell.outputs for cell in left_out)
    notebook.cells = [cell for cell in notebook.cells if cell not in left_out]


def run_notebook(path: Path, small: bool) -> Any:
    """Executes a notebook as its readers do: in its folder, with no variables but its own."""
    ours = ("JAX_PLATFORMS", "NPROC") if small else ("JAX_PLATFORMS", "NPROC", "XLA_FLAGS")
    env = {name: value for name, value in os.environ.items() if name not in ours} | COMPILED_ANEW
    notebook = nbformat.read(path, as_version=4)
    if small:
        shrink(notebook, SMALL.get(path.stem, {}))
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    start = time.monotonic()
    client.execute(env=env)
    assert time.monotonic() - start < SECONDS
    return notebook


def printed(cell: Any) -> str:
    """The text that a cell shows, but for warnings, figures and cells with the tag `timed`."""
    if "timed" in cell.metadata.get("tags", ()):
        return ""
    shown = [out.text for out in cell.get("outputs", ()) if out.get("name") == "stdout"]
    results = [out for out in cell.get("outputs", ()) if out.output_type == "execute_result"]
    text = "".join(shown + [out.data.get("text/plain", "") for out in results])
    return re.sub(r"\s+", " ", text)  # tables are padded


def is_near(shown: str, found: str) -> bool:
    """Whether two numbers, as they are printed, differ by as little as machines do."""
    a, b = Decimal(shown), Decimal(found)
    last = max(int(x.as_tuple().exponent) for x in (a, b))
    least = Decimal(1).scaleb(last) if last < 0 else 0  # counts are exact
    return abs(a - b) <= max(abs(a) / 30, least)


def outdated(committed: Any, made: Any) -> list[str]:
    """What a notebook shows that a new run does not.

    Numbers may differ by a thirtieth, or by one in the last decimal that is shown: losses and
    accuracies depend a little on the machine.
    """
    wrong = []
    for old, new in zip(committed.cells, made.cells, strict=True):
        before, after = printed(old), printed(new)
        pairs = zip(NUMBER.findall(before), NUMBER.findall(after), strict=False)
        same = NUMBER.split(before) == NUMBER.split(after)
        if not same or not all(is_near(*pair) for pair in pairs):
            wrong.append(f"{before}\n---\n{after}")
    return wrong


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS and set(SMALL) <= {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: Path) -> None:
    run_notebook(path, small=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_whole_notebook(path: Path) -> None:
    made = run_notebook(path, small=False)
    assert outdated(nbformat.read(path, as_version=4), made) == []


def test_what_is_outdated_is_seen() -> None:
    def notebook(text: str) -> Any:
        shown = nbformat.v4.new_output("stream", name="stdout", text=text)
        cell = nbformat.v4.new_code_cell("", outputs=[shown])
        return nbformat.v4.new_notebook(cells=[cell])

    kept = notebook("accuracy 93.1 %, 8 rounds")
    assert outdated(kept, notebook("accuracy  92.9 %, 8 rounds")) == []
    for text in ("accuracy 93.1 %, 7 rounds", "accuracy 93.1 %, 8 steps"):
        assert outdated(kept, notebook(text)) != []
    for shown, near, far in (("4.1e-03", "4.2e-03", "2.0e-02"), ("0.010", "0.011", "-0.009")):
        assert outdated(notebook(shown), notebook(near)) == []
        assert outdated(notebook(shown), notebook(far)) != []


def test_a_notebook_that_fails_is_seen(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in ("x = 0", "1 / x")]
    path = tmp_path / "broken.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run_notebook(path, small=True)
