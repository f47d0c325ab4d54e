"""The benchmark of exchanges on a network: its rows, and what it refuses."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def allreduce(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.allreduce", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.multiprocess
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="networks need root and iproute2"
)
def test_rows_of_a_small_star(tmp_path: Path) -> None:
    """Bytes are those of the formulas; rows are printed and kept."""
    out, n, world = tmp_path / "rows.json", 2**18, 3
    flags = ["--hosts=3", "--rate=20", f"--params={n}", "--repeats=2"]
    flags += ["--peers=/none/python", "--methods=float32,vote,bfloat16/ring"]
    done = allreduce(*flags, "--json", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PyTorch is skipped: /none/python has no torch; `make peers`")
    rows: dict[str, Any] = {r["method"]: r for r in json.loads(done.stdout.splitlines()[-1])}
    assert list(rows) == ["psum", "float32", "vote", "bfloat16/ring"]
    kept = json.loads(out.read_text())
    assert kept["rows"] == list(rows.values()) and kept["versions"]["jax"]
    for name, bits in {"psum": 32, "float32": 32, "vote": 1, "bfloat16/ring": 16}.items():
        row = rows[name]
        payload = 2 * (world - 1) / world * n * bits / 8
        # Barriers, acknowledgements and gloo's notices take about 10 KB, more on a busy machine.
        assert payload < row["bytes_busiest_link"] < 1.1 * payload + 20_000
        assert row["ms"] > 0 and row["floor_ms"] > 0 and row["stream_mbit"] < 25
        assert row["native_ms"] == rows["psum"]["ms"]
        assert row["codec"] == name.split("/")[0] and row["compile_s"] > 0
        if name != "psum":
            assert row["step_ms"] > row["step_less_compute_ms"]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="networks need root and iproute2"
)
@pytest.mark.skipif(not (ROOT / ".venv-peers/bin/python").exists(), reason="needs `make peers`")
def test_rows_of_pytorch() -> None:
    """PyTorch sends the same bytes for the same formats, and says whose rows are its own."""
    flags = ["--hosts=2", "--rate=100", f"--params={2**18}", "--repeats=2", "--methods=float32"]
    done = allreduce(*flags, "--peers", "--json")
    assert done.returncode == 0, done.stderr
    rows: dict[str, Any] = {r["method"]: r for r in json.loads(done.stdout.splitlines()[-1])}
    sent = {name: row["bytes_busiest_link"] for name, row in rows.items()}
    assert [name for name, row in rows.items() if row.get("peer")] == list(rows)[2:]
    assert 0.95 < sent["torch/float32"] / sent["float32"] < 1.05
    assert 0.45 < sent["torch/bfloat16"] / sent["float32"] < 0.55
    assert sent["torch/powersgd1"] < 0.1 * sent["float32"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--methods=int9", "unknown method 'int9'; there are psum, float32"),
        ("--methods=vote/native", "vote has default, direct, ring"),
        ("--topology=stars", "there is no topology 'stars'"),
        ("--rate=0", "rate=0: rate is 0 Mbit/s; rates are positive"),
        ("--rate=20Gbit", "rates are 0.1 to 10000, or unlimited"),
    ],
)
def test_what_cannot_be_is_one_line(
    flag: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["allreduce", flag])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks.allreduce", run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("allreduce: ") and said.count("\n") == 1
