"""Every notebook runs from its first cell to its last, in less than a minute."""

import os
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
SECONDS = 300


def run_notebook(path: Path) -> None:
    """Executes a notebook as its readers do: in its folder, with no variables but its own."""
    ours = ("JAX_PLATFORMS", "NPROC", "XLA_FLAGS")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    start = time.monotonic()
    client.execute(env=env)
    assert time.monotonic() - start < SECONDS


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: Path) -> None:
    run_notebook(path)


def test_a_notebook_that_fails_is_seen(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in ("x = 0", "1 / x")]
    path = tmp_path / "broken.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run_notebook(path)
