"""Runs side by side, and a profile of some steps."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import compare, metrics, profiling, report
from train.errors import UserError


def record(workdir: Path, steps: int, rate: float, end: bool) -> None:
    sent = {"bytes_per_param": 2.0}
    with metrics.Recorder(workdir, 0, steps, known=lambda step, frozen_at: sent) as recorder:
        recorder.write("start", 0, {"params": 10**6})
        for step in range(1, steps + 1):
            loss = float("nan") if step == 3 else rate / step
            recorder.train(step, {"loss": jnp.float32(loss)})
            if end and step % 10 == 0:
                with recorder.pause("test"):
                    recorder.looked(step, {"error": step / 100, "cosine": 0.5})
        with recorder.pause("test"):
            recorder.write("test", steps, {"test_loss": 0.5, "test_accuracy": 0.25})
        if end:
            summary = {"bytes_per_param_mean": 2.0, "params": 10**6, "step_ms": 3.0}
            recorder.write("summary", steps, {**summary, "efficiency": 1.2})


def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rate, end in (("a", 1.0, True), ("b", 2.0, False)):
        (tmp_path / name).mkdir()
        record(tmp_path / name, 30, rate, end)
    capsys.readouterr()
    out = tmp_path / "plot.png"
    assert report.main([str(tmp_path / "a"), str(tmp_path / "b"), f"--out={out}"]) == 0
    shown = capsys.readouterr().out
    rows = {
        line.split("│")[1].strip(): line.split("│") for line in shown.splitlines() if "│" in line
    }
    a, b = ([cell.strip() for cell in rows[name]] for name in ("a", "b"))
    assert a[2] == "30" and b[2] == "30 so far" and a[5] == "25.00%" and a[7] == "100.0%"
    assert a[9] == b[9] == "60.0" and a[11:14] == ["20.0%", "0.5000", "-"] and b[11] == "-"
    assert shown.splitlines()[-1] == str(out)
    last = np.mean([1 / step for step in range(11, 31)])
    assert float(a[3]) == pytest.approx(last, abs=1e-4)
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_run_that_went_on_has_not_ended(tmp_path: Path) -> None:
    record(tmp_path, 20, 1.0, end=True)
    assert compare.read(tmp_path).summary["step"] == 20
    with (tmp_path / "metrics.jsonl").open("a") as file:
        line = {"kind": "train", "loss": 1.0, "bytes_per_param": 2.0, "step_ms": 1.0}
        file.write(json.dumps({**line, "step": 21}) + "\n")
        file.write('{"kind": "train", "step": 22, "lo')  # It is just writing.
    run = compare.read(tmp_path)
    assert run.steps[-1] == 21 and run.summary == {} and run.tested["step"] == 20


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([], "the following arguments are required: WORKDIR"),
        (["x", "--ot=x"], "unrecognized arguments: --ot=x"),
    ):
        with pytest.raises(SystemExit) as ended:
            report.main(arguments)
        assert ended.value.code == 2
        said = capsys.readouterr().err.splitlines()
        assert said[-1] == f"python -m train.report: error: {message}"
    with pytest.raises(SystemExit) as ended:
        report.main(["--help"])
    assert ended.value.code == 0 and "compares runs: a table" in capsys.readouterr().out
    assert report.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path} is not the directory of a run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no step"),
        ('{"a": 1}\n', 'line 1 is not of a run: {"a": 1}'),
        ("[1, 2]\n", r"line 1 is not of a run: \[1, 2\]"),
        ('{"ki\n{"kind": "start", "step": 0}\n', "line 1 is not JSON"),
    ],
)
def test_what_is_no_history(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        compare.read(tmp_path)


def test_a_plot_in_no_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 3, 1.0, end=True)
    assert report.main([str(tmp_path), "--out", str(tmp_path / "x.foo")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: cannot write {tmp_path}/x.foo: Format 'foo' is not supported")


def test_the_perplexity_of_a_run_that_diverged() -> None:
    shown = report._score({"test_tokens": 9, "test_loss": 1e4})
    assert shown["perplexity per token"] == "inf"


def test_a_profile_of_some_steps(tmp_path: Path) -> None:
    profile, x = profiling.Profile(tmp_path, 5, 2), jnp.zeros(3)
    double = jax.jit(lambda x: 2 * x)
    for step in range(6, 20):
        profile.before(step, x)
        assert profile._running == (step in (16, 17))
        x = double(x)
    assert len(list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))) == 1
    none = profiling.Profile(tmp_path, 5, 0)
    none.before(16, x)
    assert not none._running


def test_what_is_not_finite_is_left_out_of_a_curve() -> None:
    found = compare.smoothed(np.array([np.nan, 1.0, np.inf, 3.0]))
    np.testing.assert_array_equal(found, [np.nan, 1.0, 1.0, 2.0])


def test_a_device_may_keep_nothing() -> None:
    norms = {"exchange_residual_norm": 0.0, "exchange_gradient_norm": 2.0}
    assert report._kept(norms) == "0.00"


def test_a_run_by_itself_keeps_the_name_of_its_folder() -> None:
    none = np.zeros(0)
    run = compare.Run("runs/digits", none, none, none, none, [], {}, {})
    assert [named.name for named in compare.named([run])] == ["digits"]
