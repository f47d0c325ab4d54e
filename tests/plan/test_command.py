"""`python -m benchmarks.simulate`: its rows, and one line for what cannot be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("flag", "error"),
    [("--cables=2", None), ("--per_switch=12", "powers of two, with at least two switches")],
)
def test_rows_or_one_line(flag: str, error: str | None) -> None:
    command = [sys.executable, "-m", "benchmarks.simulate", "--devices=64", "--per_switch=16", flag]
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True)
    if error:
        assert done.returncode == 2 and done.stderr.startswith("simulate: ")
        assert error in done.stderr and done.stderr.count("\n") == 1
        return
    rows = {(r["network"], r["algorithm"]): r for r in json.loads(done.stdout.splitlines()[-1])}
    assert set(rows["fat tree, D-mod-k", "ring"]["normalised"].values()) == {1.0}
    for network in ("DLN", "2-D DLN"):
        plain, shifted, spread = (
            rows[network, order]["ms"][str(2**30)] for order in ("near first", "shifted", "spread")
        )
        # 16 devices a switch, 4 switches: 15/16 and 3/64, shared by 8, by 4, or by 2 and then 4.
        assert shifted / plain == pytest.approx((60 + 3 * 4) / (60 + 3 * 8), abs=2e-3)
        assert spread < shifted or network == "2-D DLN"  # of 2 x 2 switches: no shortcut is double
