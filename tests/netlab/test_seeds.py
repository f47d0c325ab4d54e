"""The papers' experiments at a tiny size, and the tables that are made from their results."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import time_to_loss

ROOT = Path(__file__).parents[2]
on_networks = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="networks need root and iproute2"
)


def run(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def rows_of(name: str, out: Path, *flags: str) -> dict[str, dict[str, Any]]:
    """Runs an experiment; part -> name -> row of what it kept."""
    done = run(name, *flags, f"--out={out}")
    assert done.returncode == 0, done.stderr
    parts = json.loads(out.read_text())["parts"]
    for part in parts.values():
        assert part["command"].startswith(f"python -m benchmarks.{name} ")
        assert part["versions"]["jax"] and part["machine"] and part["date"]
    return {part: {row.get("name"): row for row in at["rows"]} for part, at in parts.items()}


@pytest.mark.multiprocess
@on_networks
def test_majority(tmp_path: Path) -> None:
    """A byte a bit takes 8 times the bytes, and both kinds of votes count the same."""
    n, out = 400_000, tmp_path / "rows.json"
    flags = ["--hosts=4", "--topologies=clusters", "--rate=100", f"--params={n}", "--repeats=1"]
    rows = rows_of("seed_majority", out, *flags, "--methods=byte/1-bit,byte/ring,vote/ring")
    sent = {
        name: row["bytes_busiest_link"]
        for name, row in rows["clusters of 4 hosts, 0.4 M values"].items()
    }
    # Over the middle: every link of a ring carries log2(4) bits a value; two hosts send a quarter
    # to two others in both hops of the 1-bit exchange.
    for name, bits in {"byte/1-bit": 16, "byte/ring": 16, "vote/ring": 2}.items():
        # The coordinator's traffic grows with the time that the processes need, not with n.
        assert n * bits / 8 < sent[name] < 1.1 * n * bits / 8 + 16_000, name


@pytest.mark.slow
@pytest.mark.multiprocess
@on_networks
def test_ethernet(tmp_path: Path) -> None:
    """Two accumulated steps send half of the bytes; efficiencies are those of the times."""
    flags = ["--side=128", "--rows=2048", "--repeats=1"]
    parts = rows_of(
        "seed_ethernet", tmp_path / "rows.json", *flags, "--methods=bfloat16,bfloat16 x2"
    )
    assert list(parts) == ["one", "two"]
    for rows in parts.values():
        for row in rows.values():
            assert row["efficiency"] == 100 * rows["compute"]["ms"] / row["ms"]
            assert row["efficiency"] < 1.2 * row["bytes_allow"] + 1
    one = {name: row["bytes_busiest_link"] for name, row in parts["one"].items()}
    assert one["compute"] < 2000 < one["bfloat16"]
    assert 0.4 < one["bfloat16 x2"] / one["bfloat16"] < 0.6
    assert parts["one"]["bfloat16"]["paper"] == 81.5


@pytest.mark.slow
@pytest.mark.multiprocess
@on_networks
def test_cnat(tmp_path: Path) -> None:
    """Elements a second are those of the times; a run is followed until its accuracy."""
    out = tmp_path / "rows.json"
    flags = ["--parts=2,train", "--params=1e5", "--repeats=3", "--rate=50", "--width=16"]
    parts = rows_of(
        "seed_cnat", out, *flags, "--steps=10", "--seeds=1", "--accuracy=0.05", "--train_rate=100"
    )
    rows = parts["2 workers"]
    assert set(rows) == {"float32", "bfloat16", "int8", "cnat"}
    for row in rows.values():
        assert len(row["elements_per_second"]) == 3
        assert row["elements_per_second"][0] == pytest.approx(1e3 * 99_328 / row["all_ms"][0])
    trained = json.loads(out.read_text())["parts"]["train"]
    float32, cnat = trained["rows"]
    assert float32["steps"] == cnat["steps"] == 5
    assert 3 < float32["bytes_per_param"] / cnat["bytes_per_param"] < 4
    assert trained["change"] == pytest.approx(100 * (cnat["seconds"] / float32["seconds"] - 1))


@pytest.mark.slow
@pytest.mark.multiprocess
@on_networks
def test_oktopk(tmp_path: Path) -> None:
    """What travels is what the paper counts, and the room that static messages need."""
    flags = ["--worlds=2,4", "--params=5e5", "--methods=float32,topk_allgather", "--repeats=1"]
    parts = rows_of("seed_oktopk", tmp_path / "rows.json", *flags, "--rate=200")
    assert list(parts) == ["02 hosts", "04 hosts"]
    for rows in parts.values():
        for row in rows.values():
            assert 0.6 < row["volume"] / row["paper"][0] < 1.3


@pytest.mark.multiprocess
@on_networks
def test_split_muon(tmp_path: Path) -> None:
    """Four layers on two hosts: of each stack of parts, half is sent, there and back."""
    flags = ["--hosts=2", "--layers=4", "--width=64", "--repeats=1"]
    (rows,) = rows_of("split_muon", tmp_path / "rows.json", *flags).values()
    for name, bits in {"orthogonalize": 32, "orthogonalize, bfloat16": 16}.items():
        sent = 2 * (4 * 12 * 64**2) * bits / 8 / 2 / 2
        assert sent < rows[name]["bytes_busiest_link"] < 1.1 * sent + 16_000
        assert 4 * sent < rows["optax.contrib.muon"]["bytes_busiest_link"]


@pytest.mark.slow
@pytest.mark.multiprocess
@on_networks
def test_training(tmp_path: Path) -> None:
    """Times add up; on a slow link, few bytes need less time for twice as many steps."""
    out = tmp_path / "rows.json"
    flags = ["--hosts=2", "--steps=60", "--depth=1", "--batch_size=4", "--seeds=1", "--rate=20"]
    rows_of("time_to_loss", out, *flags, "--methods=float32,local_steps")
    rows = time_to_loss.rows_of(json.loads(out.read_text())["parts"])
    float32, local = rows
    assert float32["params"] == local["params"]
    assert float32["bytes_per_param_mean"] > 50 * local["bytes_per_param_mean"]
    assert (float32["steps"], local["steps"]) == (60, 120)
    for row in rows:
        assert 4 * len(row["curve"]) == row["steps"]
        assert row["seconds"] > row["steps"] * row["step_ms"] / 2e3
        assert row["curve"][0][1] > row["loss"]
    assert local["seconds"] < float32["seconds"]


def test_what_training_is_compared_by() -> None:
    """The goal is what float32 has after four fifths of its steps, for each seed."""
    curves = {
        ("float32", 0): [(1.0, 5.0), (2.0, 4.0), (3.0, 3.5), (4.0, 3.0), (5.0, 2.5)],
        ("float32", 1): [(1.0, 5.0), (2.0, 4.0), (3.0, 3.0), (4.0, 2.0), (5.0, 1.5)],
        ("int4", 0): [(0.5, 5.0), (1.0, 3.0), (1.5, 2.9), (2.0, 2.8), (2.5, 2.7)],
        ("int4", 1): [(0.5, 5.0), (1.0, 4.0), (1.5, 3.0), (2.0, 2.5), (2.5, 2.0)],
        ("cnat", 0): [(0.5, 5.0), (1.0, 5.0), (1.5, 5.0), (2.0, 5.0), (2.5, 3.1)],
    }
    other = {"step_ms": 1.0, "compute_ms": 1.0, "bytes_per_param_mean": 6.0, "steps": 5}
    rows = [
        {"method": m, "seed": s, "curve": c, "loss": c[-1][1], "seconds": c[-1][0], **other}
        for (m, s), c in curves.items()
    ]
    assert time_to_loss.goals(rows) == {0: 3.0, 1: 2.0}
    float32, int4, cnat = time_to_loss.means(rows)
    assert (float32["until"], int4["until"], cnat["until"]) == (4.0, 1.75, None)
    assert (float32["loss"], int4["loss"]) == (2.0, 2.35)


@pytest.mark.parametrize(
    ("name", "flag", "message"),
    [
        ("seed_majority", "--methods=votes", "unknown method 'votes'; there are float32/ring"),
        ("seed_majority", "--topologies=stars", "there is no topology 'stars'"),
        ("seed_ethernet", "--parts=three", "unknown part 'three'; there are one, two"),
        (
            "seed_cnat",
            "--parts=some",
            "a part is a number of workers above 1, or train, got 'some'",
        ),
        ("compile_time", "--methods=votes", "unknown method 'votes'; there are psum, float32"),
        ("planner", "--methods=votes", "unknown method 'votes'; there are float32/native,"),
        ("seed_oktopk", "--methods=top", "unknown method 'top'; there are float32,oktopk,"),
        ("time_to_loss", "--steps=100", "steps are a multiple of 60, got 100."),
    ],
)
def test_what_cannot_be_is_one_line(
    name: str,
    flag: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [name, flag])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith(f"{name}: ") and said.count("\n") == 1


def test_compile_time(tmp_path: Path) -> None:
    """Every method and size has its seconds."""
    out = tmp_path / "rows.json"
    rows_of("compile_time", out, "--params=3e4,6e4", "--methods=float32,bfloat16")
    rows = json.loads(out.read_text())["parts"]["compile time"]["rows"]
    assert [row["method"] for row in rows] == ["float32", "bfloat16"]
    assert all(s > 0 for row in rows for s in row["seconds"].values())
    models = ["0.03 million values", "0.06 million values", "192 leaves"]
    assert all(list(row["seconds"]) == models for row in rows)


def test_the_tables_are_what_the_results_say(tmp_path: Path) -> None:
    """And a number that is not is found."""
    done = run("tables", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "docs/measurements.md").read_text()
    start = page.index("<!-- table exchanges -->")
    part = page[start : page.index("<!-- end -->", start) + len("<!-- end -->")]
    wrong = tmp_path / "page.md"
    wrong.write_text(part.replace("| float32 mean | 2", "| float32 mean | 3", 1))
    assert wrong.read_text() != part
    done = run("tables", "--check", f"--page={wrong}")
    assert done.returncode == 1 and "page.md is not what the results say" in done.stdout


@pytest.mark.slow
@pytest.mark.multiprocess
@on_networks
def test_dln(tmp_path: Path) -> None:
    """Two switches with two hosts each: means are numpy's, and a host sends 1.5 vectors."""
    n, out, small = 20_000, tmp_path / "rows.json", tmp_path / "small.yaml"
    small.write_text("fabric: dln\nhosts: 4\nrate: 100\nhosts_per_switch: 2\n")
    parts = rows_of("seed_dln", out, f"--topology={small}", f"--params={n}", "--repeats=1")
    (rows,) = parts.values()
    assert set(rows) == {"ring", "near_first", "far_first", "shifted", "spread"}
    for name, row in rows.items():
        # Far first both hosts of a switch send half of the vector over its only shortcut.
        shared = 2 if name == "far_first" else 1.5
        assert shared * 4 * n < row["bytes_busiest_link"] < shared * 4 * n * 1.1 + 4000, name
        assert 0 < row["predicted_ms"] <= row["predicted_half_duplex_ms"]
