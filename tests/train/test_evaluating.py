"""Checkpoints are tested without training, and read by programs of other people."""

import runpy
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import config_dict
from running import ROOT, Program, checkpoint_bits, read_lines

import jaxcomm
from train import checkpoint, data, digests, evaluating, loop
from train.errors import UserError


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files with their times and bytes."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in paths}


@pytest.fixture
def trained(config: config_dict.ConfigDict, tmp_path: Path) -> tuple[Path, dict[str, float]]:
    """A short run, and its summary."""
    summary = loop.train(config, tmp_path / "run", 0.0)
    assert summary is not None
    return tmp_path / "run", summary


def test_a_checkpoint_is_tested_and_used_elsewhere(
    trained: tuple[Path, dict[str, float]],
    config: config_dict.ConfigDict,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the optimizer, exchange and layout of another run; and nothing is written."""
    workdir, summary = trained
    capsys.readouterr()
    before, other = files(workdir), config.copy_and_resolve_references()
    other.optimizer.name, other.sync.gather, other.sync.codec = "adamw", "bfloat16", "int8"
    for asked in (config, other):
        found = evaluating.evaluate(asked, workdir)
        assert found["step"] == 4 and found["test_images"] == 360
        assert found["test_accuracy"] == summary["test_accuracy"]
        assert found["test_loss"] == pytest.approx(summary["test_loss"], rel=1e-6)
        shown = capsys.readouterr()
        assert shown.out.startswith('{"step": 4, "test_loss": ') and shown.err == ""
    assert files(workdir) == before

    monkeypatch.setattr(sys, "argv", ["load_parameters.py", str(workdir)])
    jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:1]))
    made = runpy.run_path(str(ROOT / "docs" / "load_parameters.py"))
    assert capsys.readouterr().out == "step 4: 10 classes\n"
    leaves = jax.tree.leaves(made["saved"]["params"])
    saved = {n: x for n, x in checkpoint_bits(workdir, 4).items() if n.startswith("['params']")}
    assert [np.asarray(leaf).tobytes() for leaf in leaves] == list(saved.values())
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in leaves)
    rows = data.load(config.data, 64, range(8), 8, 0).test
    right = sum(
        ((made["logits"](b["image"]).argmax(-1) == b["label"]) * b["weight"]).sum() for b in rows
    )
    assert float(right) / 360 == pytest.approx(summary["test_accuracy"])


def test_the_best_of_all_tests_is_tested(
    config: config_dict.ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tests are followed by a checkpoint, the last one too, and a run goes on from the newest."""
    config.checkpoint.best, config.checkpoint.every, config.checkpoint.keep = "test_loss", 100, 1
    config.eval_every = 1
    loop.train(config, tmp_path, 0.0)
    lines = read_lines(tmp_path, "test")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    best = min(reversed(lines), key=lambda line: line["test_loss"])
    found = evaluating.evaluate(config, tmp_path)
    assert {name: found[name] for name in ("step", "test_loss")} == pytest.approx(
        {name: best[name] for name in ("step", "test_loss")}
    )
    kept = {int(path.name) for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {4, found["step"]}
    config.checkpoint.resume, config.steps = True, 5
    assert loop.train(config, tmp_path, 0.0) is not None
    assert [line["step"] for line in read_lines(tmp_path, "test")] == [1, 2, 3, 4, 5]


def test_what_does_not_fit_is_named(
    trained: tuple[Path, dict[str, float]],
    config: config_dict.ConfigDict,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workdir, _ = trained
    config.data.std = 3.0
    evaluating.evaluate(config, workdir)
    assert capsys.readouterr().err == "the run had another config: data.std=3.0 (was 6.0)\n"
    config.model.width = 8
    there = r"does not fit this model: params.blocks.* there and .* here; changed since then"
    with pytest.raises(UserError, match=f"checkpoint 4 in .* {there}: .*config.model.width=8"):
        evaluating.evaluate(config, workdir)


def test_damaged_checkpoints_are_passed_over_and_stay(
    trained: tuple[Path, dict[str, float]],
    config: config_dict.ConfigDict,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workdir, _ = trained
    (workdir / "checkpoints" / "4" / digests.FILE).unlink()
    assert evaluating.evaluate(config, workdir)["step"] == 2
    said = "checkpoint 4 is damaged (digests.json is missing): the previous one is used, if there"
    assert capsys.readouterr().err.startswith(said)
    assert (workdir / "checkpoints" / "4").is_dir()
    shutil.rmtree(workdir / "checkpoints" / "2")
    with pytest.raises(UserError, match="--evaluate: there is no complete checkpoint in .*; set"):
        evaluating.evaluate(config, workdir)


def test_a_run_that_still_trains_deletes_what_is_tested(
    trained: tuple[Path, dict[str, float]],
    config: config_dict.ConfigDict,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While its bytes are compared, and while they are read: the next one is tested."""
    folder, damage, read = trained[0] / "checkpoints", digests.damage, checkpoint.read_params
    capsys.readouterr()

    def replaced(old: int, new: int) -> None:
        (folder / str(old)).rename(folder / str(new))

    def damage_of(step: Path) -> str | None:
        if step.name == "4":
            replaced(4, 5)
        return damage(step)

    def read_at(directory: Path, step: int, like: object) -> object:
        if step == 5:
            replaced(5, 6)
        return read(directory, step, like)

    def read_gone(directory: Path, step: int, like: object) -> object:
        shutil.rmtree(directory / str(step))
        return read(directory, step, like)

    monkeypatch.setattr(digests, "damage", damage_of)
    monkeypatch.setattr(checkpoint, "read_params", read_at)
    assert evaluating.evaluate(config, trained[0])["step"] == 6
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(checkpoint, "read_params", read_gone)
    with pytest.raises(
        UserError, match="the run deleted checkpoint 2 while it was read; start --e"
    ):
        evaluating.evaluate(config, trained[0])


@pytest.mark.multiprocess
def test_two_processes_test_what_one_has_trained(
    trained: tuple[Path, dict[str, float]], program: Program
) -> None:
    workdir, summary = trained
    arguments = ["--config=configs/digits_resnet.py", f"--workdir={workdir}", "--evaluate"]
    done = program.run("train.launch", "--processes=2", "--", *arguments)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (line,) = done.stdout.splitlines()
    assert f'"test_accuracy": {summary["test_accuracy"]}' in line
