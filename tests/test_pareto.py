"""What the benchmark of loss against bytes makes of its runs; the runs themselves take minutes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.pareto import results
from benchmarks.pareto.rows import TABLES
from benchmarks.pareto.tasks import TASKS

ROOT = Path(__file__).parent.parent


def row(method: str, rate: float, seed: int, validation: float | None, test: float | None) -> dict:
    return {
        "task": "gpt",
        "method": method,
        "optimizer": "adam",
        "rate": rate,
        "seed": seed,
        "loss": test,
        "validation_loss": validation,
        "bytes_per_step": 6.0 if method == "float32" else 0.25,
    }


@pytest.fixture
def rows(tmp_path: Path) -> results.Rows:
    made = [
        row("float32", 1e-3, 0, 2.2, 2.1),
        row("float32", 2e-3, 0, 2.1, 2.3),  # chosen on validation, although its test loss is higher
        row("float32", 2e-3, 1, 2.1, 2.4),
        row("float32", 1e-3, 1, 2.2, 2.1),
        row("float32", 4e-3, 0, 1.9, 2.0),  # of one seed only
        row("1 bit", 1e-3, 0, None, None),  # diverged
        row("1 bit", 5e-4, 0, 2.5, 2.6),
        row("1 bit", 2.5e-4, 0, 2.6, 2.5),
    ]
    for r in made:
        path = results.path(tmp_path, r["task"], r["method"], r["rate"], r["seed"])
        assert not path.exists(), "two runs would share a file"
        results.write(path, r)
    return results.read(tmp_path)


def test_validation_chooses_the_rate_and_test_is_reported(rows: results.Rows) -> None:
    chosen = {(r["method"], r["rate"], r["seed"]): r["minus_float32"] for r in rows if r["chosen"]}
    assert chosen == {
        ("float32", 2e-3, 0): 0,
        ("float32", 2e-3, 1): 0,
        ("1 bit", 5e-4, 0): pytest.approx(0.3),
    }
    by_method = {line["method"]: line for line in results.summaries(rows)}
    assert by_method["float32"]["loss"] == pytest.approx(2.35)
    assert by_method["float32"]["rates"] == 2, "those that both seeds have"
    assert by_method["float32"]["note"] == by_method["1 bit"]["note"] == ""
    assert len(results.table(rows).splitlines()) == 3


def test_nesterovs_momentum_is_compared_with_float32_that_has_it(tmp_path: Path) -> None:
    made = [
        row("float32", 1e-3, 0, 2.0, 2.0),
        row("Nadam, float32", 1e-3, 0, 1.9, 1.9) | {"optimizer": "nadam"},
        row("1 bit", 1e-3, 0, 2.2, 2.2) | {"optimizer": "local nadam"},
        row("2 bits", 1e-3, 0, 2.1, 2.1),
        row("4 local steps, scaled_sign, outer momentum", 1e-3, 0, 2.0, 2.0),
    ]
    for r in made:
        results.write(results.path(tmp_path, r["task"], r["method"], r["rate"], r["seed"]), r)
    found = {r["method"]: round(r["minus_float32"], 3) for r in results.read(tmp_path)}
    assert found.pop("4 local steps, scaled_sign, outer momentum") == 0.1  # its outer momentum
    assert found == {"float32": 0, "Nadam, float32": 0, "1 bit": 0.3, "2 bits": 0.1}


def test_the_report_ends_with_the_committed_rows_and_runs_nothing() -> None:
    command = [sys.executable, "-m", "benchmarks.pareto", "--report", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    rows = json.loads(done.stdout.splitlines()[-1])
    files = list((ROOT / "benchmarks" / "results" / "pareto").glob("*/*.json"))
    assert len(rows) == len(files) > 0
    wanted = {"task", "method", "optimizer", "rate", "seed", "loss", "bytes_per_step"}
    assert all(wanted | {"minus_float32", "chosen"} <= r.keys() for r in rows)


def test_every_task_has_methods_and_a_title() -> None:
    assert TASKS.keys() == TABLES.keys() == results.TITLES.keys()


@pytest.mark.parametrize("flag", ["--tasks=gtp", "--methods=no such row"])
def test_an_unknown_name_is_one_line(flag: str) -> None:
    command = [sys.executable, "-m", "benchmarks.pareto", flag]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    name = flag.split("=")[1]
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"'{name}'; there are" in done.stderr
