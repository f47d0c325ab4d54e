"""The commands of the planner: flags that cannot be obeyed are a line, before anything runs."""

import sys
from pathlib import Path

import pytest

from jaxcomm import plan, probe
from jaxcomm.plan.__main__ import main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--json", "--accumulate=4,1"], "--json takes one number of --accumulate, got 2."),
        (["--costs=costs.yaml", "--set", "device=gpu"], "device=gpu: device chooses default"),
        (["--accumulate=a"], "--accumulate: expected whole numbers such as 1,2,4,8, got 'a'"),
    ],
)
def test_the_plan(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    plan.defaults("cpu").save("costs.yaml")
    monkeypatch.setattr(sys, "argv", ["plan", "star", "--params=1e6", "--step-ms=10", *flags])
    try:
        status = main()
    except SystemExit as end:  # of argparse
        status = end.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "") and message in said.err.splitlines()[-1]


def test_a_probe_that_could_not_be_written_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(plan, "probe", None)
    for out in (tmp_path / "no" / "costs.yaml", tmp_path):
        monkeypatch.setattr(sys, "argv", ["probe", f"--out={out}"])
        assert probe.main() == 2
        said = f"probe: --out={out}: expected a file in a folder that exists.\n"
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_one_of_several_processes_does_not_probe_itself(
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """As under an MPI of which jax knows nothing."""

    def initialize() -> None:
        raise error("coordinator_address should be defined.")

    monkeypatch.setattr(plan, "probe", None)
    monkeypatch.setattr(probe.jax.distributed, "initialize", initialize)
    monkeypatch.setattr(sys, "argv", ["probe", f"--out={tmp_path}/c.yaml"])
    monkeypatch.setenv("PMI_SIZE", "4")
    assert probe.main() == 2
    said = capsys.readouterr().err
    assert said.startswith("probe: PMI_SIZE=4 says that this is one of several processes")
    assert "add --coordinator=HOST:PORT --processes=N --process=I" in said


def test_a_probe_of_several_processes_needs_their_coordinator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(plan, "probe", None)
    monkeypatch.setattr(sys, "argv", ["probe", f"--out={tmp_path}/c.yaml", "--processes=2"])
    assert probe.main() == 2
    said = "probe: --processes and --process need --coordinator=HOST:PORT.\n"
    assert capsys.readouterr().err == said


def test_a_file_that_is_whole_with_a_flag_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("fabric: star\nhosts: 4\n")
    flags = ["--set", "rate=1Gbit", "--params=1e6", "--step-ms=20"]
    monkeypatch.setattr(sys, "argv", ["plan", str(tmp_path / "c.yaml"), *flags])
    assert main() == 0
    said = capsys.readouterr()
    assert "what limits you" in said.out and "without --set" not in said.out and not said.err


def test_a_file_may_name_the_costs_that_a_probe_will_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text("fabric: star\nhosts: 4\nrate: 100\ncosts: costs.yaml\n")
    monkeypatch.setattr(plan, "probe", lambda cluster: plan.defaults("cpu"))
    monkeypatch.setattr(sys, "argv", ["probe", "--cluster=cluster.yaml"])
    for _ in range(2):
        assert probe.main() == 0
        made = plan.load_cluster("cluster.yaml")
        assert made.costs == plan.defaults("cpu")
        Path("costs.yaml").write_text("version: 1\n")  # of another version of jaxcomm
    capsys.readouterr()


def test_costs_of_a_flag_are_in_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    plan.defaults("gpu").save("mine.yaml")
    assert plan.load_cluster("star", {"costs": "mine.yaml"}).costs == plan.defaults("gpu")
