"""Arguments of the benchmarks: what cannot be is one clear line, before anything runs."""

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import arguments, device_time, planner
from processes import COMPILED_ANEW

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("reader", "good", "bad"),
    [
        (arguments.count, {"1": 1, "20": 20}, ["0", "-1", "1.5", "a", ""]),
        (arguments.whole, {"0": 0}, ["-1", "a"]),
        (arguments.values, {"8e6": 8e6}, ["0", "-5", "0.5", "nan", "inf", "a"]),
        (arguments.hundredth, {"0.01": 0.01, "16": 16}, ["0.001", "0", "nan", "inf"]),
        (arguments.positive, {"0.1": 0.1}, ["0", "-1", "nan", "inf"]),
        (arguments.share, {"0.01": 0.01, "1": 1}, ["0", "1.1", "nan"]),
        (arguments.at_least_zero, {"0": 0}, ["-0.1", "nan", "inf"]),
        (arguments.several(arguments.count), {"1,2": [1, 2]}, ["1,", "1,0"]),
        (arguments.one_of(["a", "b"]), {"a": "a"}, ["c"]),
    ],
)
def test_a_reader(reader: arguments.Reader, good: dict[str, object], bad: list[str]) -> None:
    assert {text: reader(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="expected .*got '|unknown '"):
            reader(text)


def test_steps_by_count_and_as_the_host_says(tmp_path: Path) -> None:
    out = tmp_path / "due.json"
    line = [sys.executable, "-m", "benchmarks.due", "--params=2e6", "--rounds=1", f"--out={out}"]
    subprocess.run(line, cwd=ROOT, env=os.environ | COMPILED_ANEW, check=True, timeout=200)
    (part,) = json.loads(out.read_text())["parts"].values()
    assert len(part["rows"]) == 12 and all(row["ms"] > 0 for row in part["rows"])


def test_paths(tmp_path: Path) -> None:
    new = tmp_path / "new.png"
    assert arguments.new_file(str(new)) == new and arguments.new_file("new.png") == Path("new.png")
    for text in (str(tmp_path), str(tmp_path / "no" / "new.png")):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a file to write"):
            arguments.new_file(text)
    with pytest.raises(argparse.ArgumentTypeError, match="expected a file that exists"):
        arguments.existing_file(str(new))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("compile_time --params=-5", "--params: expected a number of at least 1, such as 8e6"),
        ("allreduce --params=-1 --rate=50", "--params: expected a number of at least 1"),
        ("allreduce --repeats=0", "--repeats: expected a whole number of at least 1, got '0'"),
        ("kernels --only=pack", "--only: unknown 'pack'; there are copy, bitplanes.add,"),
        ("gpu_steps --lowered=/nope", "--lowered: expected a folder that exists, got '/nope'"),
        ("gpu_steps --lowered=tests", "--lowered: there is no tests/resnet50_none.pickle; name"),
        ("gpu_steps --methods=bf16", "--methods: unknown 'bf16'; there are float32, bfloat16,"),
        ("exchange --mib=0", "--mib: expected a whole number of at least 1, got '0'"),
        ("exchange --processes=0", "--processes: expected a whole number of at least 1"),
        ("tables --page=nope.md", "--page: expected a file that exists, got 'nope.md'"),
        ("sparse_bytes --out=/nodir/x.png", "--out: expected a file to write, but '/nodir/x.png'"),
        ("simulate --png=/nodir/x.png", "--png: expected a file to write"),
        ("digits --rows=nope", "--rows: unknown 'nope'; there are float32, bfloat16,"),
        ("powersgd --seeds=a", "--seeds: expected a whole number of at least 0, got 'a'"),
        ("pareto --seeds=a", "--seeds: expected a whole number of at least 0, got 'a'"),
        ("seed_cnat --seeds=a", "--seeds: expected a whole number of at least 0, got 'a'"),
        ("seed_cnat --parts=1", "seed_cnat: a part is a number of workers above 1, or train"),
        ("seed_ethernet --methods=nope", "seed_ethernet: unknown method 'nope'; there are psum,"),
        ("seed_ethernet --parts=two --out=nope.json", "nope.json has no part 'one', whose rate"),
        ("split_muon --width=6", "split_muon: --width=6 cannot be split over 4 hosts."),
        ("split_muon --layers=0", "--layers: expected a whole number of at least 1, got '0'"),
        ("seed_oktopk --worlds=2,x", "--worlds: expected a whole number of at least 1, got 'x'"),
        ("pareto --at=0", "--at: expected a number above 0, got '0'"),
        ("codecs --only=nope", "--only: unknown 'nope'; there are cnat, cnat fixed,"),
        ("kernels --mib=1e-7", "--mib: expected a number of at least 0.01, got '1e-7'"),
        ("selection --millions=0", "--millions: expected a number of at least 0.01, got '0'"),
        ("simgrid_fixtures --only=nope", "--only: unknown 'nope'; there are "),
        ("loss_curves --out=x.png nope", "runs: expected name=workdir,workdir, got 'nope'"),
        ("pareto --report --plot=/nodir/x.png", "--plot: expected a file to write"),
        ("pareto --report --results=/nope", "pareto: --results=/nope has no run"),
        ("pareto --report --tasks=nope", "pareto: unknown task 'nope'; there are gpt"),
        ("pareto --report --methods=nope", "pareto: unknown method 'nope'; there are "),
        ("planner --report --out=/nope.json", "planner: /nope.json has no network that was"),
    ],
)
def test_a_wrong_argument_is_a_line(
    command: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Called in this process: starting one for each would take longer than all the rest."""
    name, *flags = command.split()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    module = "pareto.__main__" if name == "pareto" else name
    with pytest.raises(SystemExit) as ended:
        sys.exit(importlib.import_module(f"benchmarks.{module}").main())
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert message in said.err.splitlines()[-1]


def test_a_wrong_argument_of_a_process() -> None:
    run = [sys.executable, "-m", "benchmarks.seed_cnat", "--parts=1"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr
    assert "seed_cnat: a part is a number" in done.stderr.splitlines()[-1]


def test_the_report_of_some_tasks_and_methods() -> None:
    run = [sys.executable, "-m", "benchmarks.pareto", "--report", "--json", "--tasks=gpt,lstm"]
    run += ["--methods=float32;cnat"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert {row["task"] for row in rows} == {"gpt", "lstm"}
    assert {row["method"] for row in rows} <= {"float32", "cnat"}
    assert all(row["minus_float32"] is not None for row in rows if row["method"] == "cnat")


def test_a_choice_that_was_the_best_has_no_worst_method() -> None:
    row = {
        "size": 1e6,
        "devices": 2,
        "networks": 1,
        "choices": 4,
        "good": 4,
        "leaders_timed": 4,
        "timed": 4,
    }
    row |= {"worst": 1.0, "chosen": "vote/ring", "best": "vote/ring"}
    _, (best, worse) = planner.choices_table({"choices": [row, {**row, "best": "int8/ring"}]})
    assert (best[-1], worse[-1]) == ("", "`vote/ring`, not `int8/ring`")


def test_what_is_for_gpus_runs_on_cpus(tmp_path: Path) -> None:
    """There it says that it is no measurement, and has no kernel that the profiler records."""
    lower = f"aot.lowered cpu {tmp_path} --scale=tiny --model=transformer --methods=low_rank"
    line = [sys.executable, "-m", *f"benchmarks.{lower}".split()]
    subprocess.run(line, cwd=ROOT, check=True, timeout=200)
    steps = "gpu_steps --model=transformer --repeats=1"
    for command, last in (
        ("kernels --mib=0.125 --repeats=1 --only=bitplanes.pack", "bitplanes.pack"),
        (f"{steps} --methods=vote --scale=tiny", "vote"),
        (f"{steps} --methods=low_rank --lowered={tmp_path}", "low_rank"),
    ):
        out = tmp_path / f"{last}.json"
        line = [sys.executable, "-m", *f"benchmarks.{command} --out={out}".split()]
        run = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert run.returncode == 0, run.stderr
        kept = json.loads(out.read_text())
        row = kept.get("rows", kept.get("transformer"))[-1]
        assert last in (row.get("operation"), row.get("method"))
        assert "NOT a measurement" in run.stdout or row["kernels_ms"] == 0


def test_kernels_are_those_of_equal_calls() -> None:
    kernels = [device_time.Kernel("k", "jit_f", "op", i, 10.0 + i) for i in range(6)]
    assert device_time.per_call(kernels, 3) == [21, 25, 29]
    for wrong in (kernels[:5], []):
        with pytest.raises(ValueError, match="are not those of 3 equal calls"):
            device_time.per_call(wrong, 3)


def test_results_are_added_to_those_of_the_same_machine(tmp_path: Path) -> None:
    path, here = tmp_path / "r.json", {"device": "H100"}
    save = functools.partial(device_time.keep, path, here, "rows", key=("name",))
    save([{"name": "a", "us": 1}, {"name": "b", "us": 2}])
    save([{"name": "a", "us": 3}])
    assert json.loads(path.read_text())["rows"] == [{"name": "a", "us": 3}, {"name": "b", "us": 2}]
    elsewhere = functools.partial(device_time.keep, path, {"device": "A10"}, "rows", key=("name",))
    with pytest.raises(SystemExit):
        device_time.refused(argparse.ArgumentParser(), elsewhere)
    assert json.loads(path.read_text())["machine"] == here
