"""Whole runs: what they print and leave behind, on one process and on four."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import cifar
import imagenet
import jax
import pytest
from ml_collections import config_dict
from running import Program, checkpoint_bits, children, read_config, read_lines

from jaxcomm import plan
from jaxcomm.plan import timing
from train import agreement, loop, models, predicting, profiling, signals, sync
from train.errors import RunError, UserError
from train.run import assemble

NUMBERS = {
    "test_accuracy",
    "step_ms",
    "communication_ms",
    "bytes_per_param",
    "devices",
    "processes",
    "seconds",
}


TINY_VIT = {"model.depth": 1, "model.width": 16, "model.heads": 2, "model.mlp_width": 32}
TINY_RESNET = {"model.stages": (1,)}
TINY_TEXT = {
    "lm_transformer": {
        "data.sequence_length": 64,
        "data.train_split": "validation",
        "model.depth": 2,
        "model.width": 32,
        "model.heads": 2,
        "model.mlp_width": 64,
    },
    "lm_transformer_local": {
        "data.sequence_length": 32,
        "data.train_split": "validation",
        "model.depth": 1,
        "model.width": 16,
        "model.heads": 2,
        "model.mlp_width": 32,
    },
    "text_bert": {"model.width": 16, "model.depth": 1, "model.mlp_width": 32},
    "text_lstm": {"model.width": 32, "model.layers": 1},
}


def test_one_process_with_eight_devices(
    config: config_dict.ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.inspect.every = 3
    summary = loop.train(config, tmp_path, 0.0)
    shown = capsys.readouterr()
    *table, last = shown.out.splitlines()
    assert json.loads(last) == summary
    assert NUMBERS <= {name for name, value in summary.items() if value is not None}
    assert (summary["devices"], summary["processes"], summary["test_images"]) == (8, 1, 360)
    assert "8 devices in 1 processes" in table[0]
    rows = "\n".join(table)
    assert f"{100 * summary['test_accuracy']:.2f} % of 360 images" in rows
    assert f"{summary['bytes_per_param']:.3f}" in rows
    assert 0 < summary["input_share"] < 1 and summary["images_per_second"] > 0
    lines = read_lines(tmp_path, "train")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["learning_rate"] for line in lines] == pytest.approx([0, 0.1 / 3, 0.2 / 3, 0.1])
    assert {line["bytes_per_param"] for line in lines} == {summary["bytes_per_param"]}
    assert [line["step"] for line in read_lines(tmp_path, "test")] == [2, 4]
    (look,) = read_lines(tmp_path, "exchange")
    assert look["step"] == 3 and 0 < look["error"] < 0.01  # bfloat16 rounds in the eighth bit.
    assert 0 < look["gradient_norm"] < look["device_gradient_norm"]
    assert f"cosine {look['cosine']:.4f}" in rows
    splits = read_lines(tmp_path, "split")
    assert [(line["step"], line["steps"]) for line in splits] == [(2, 2), (3, 1), (4, 1)]
    assert splits[0]["test_ms"] > 0 and "compute_ms" not in splits[0]
    assert splits[1]["compute_ms"] > 0 and splits[1]["exchange_ms"] >= 0
    assert splits[2]["look_ms"] > 0 and splits[2]["checkpoint_ms"] > 0
    assert read_lines(tmp_path, "summary") == [{"kind": "summary", "step": 4, **summary}]
    data = json.loads((tmp_path / "data.json").read_text())
    assert data["number of rows of train_split 'train'"] == "1437"
    assert list(tmp_path.glob("events.out.tfevents.*"))
    assert (tmp_path / "checkpoints" / "4").is_dir()
    # It has no optimizer with a warm-up.
    assert summary["frozen_at"] is None and read_lines(tmp_path, "warmup_ended") == []
    assert "warm-up" not in shown.out + shown.err

    # A finished run can be asked again.
    before = checkpoint_bits(tmp_path, 4)
    config.checkpoint.resume = True
    again = loop.train(config, tmp_path, 0.0)
    assert again["test_accuracy"] == summary["test_accuracy"]
    assert again["loop_step_ms"] is None
    assert [line["step"] for line in read_lines(tmp_path, "test")] == [2, 4]
    assert read_lines(tmp_path, "summary") == [{"kind": "summary", "step": 4, **again}]
    assert checkpoint_bits(tmp_path, 4) == before
    assert "continues with" not in capsys.readouterr().err
    other = config.copy_and_resolve_references()
    other.optimizer.name, other.steps = "adamw", 5
    changed = r"changed since then: .*config.optimizer.name='adamw' \(was 'sgd'\)"
    with pytest.raises(UserError, match=f"checkpoint 4 in .* does not fit this model.*; {changed}"):
        loop.train(other, tmp_path, 0.0)
    config.steps = 3
    with pytest.raises(UserError, match="config.steps=3 is less than the 4 steps of the checkpoi"):
        loop.train(config, tmp_path, 0.0)
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 4


@pytest.mark.parametrize("method", ["mean", "majority_vote", "low_rank_mean"])
def test_the_seed_is_that_of_the_exchange(
    method: str, config: config_dict.ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs with other seeds round otherwise, and toss other coins."""
    seeds, (factory, names) = [], sync.METHODS[method]

    def kept(*args: Any, seed: int, **options: Any) -> Any:
        seeds.append(seed)
        return factory(*args, seed=seed, **options)

    monkeypatch.setitem(sync.METHODS, method, (kept, names))
    config.seed, config.sync.method = 7, method
    assemble(config, tmp_path)
    assert seeds == [7]


def test_the_data_are_compared_between_processes(
    config: config_dict.ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    monkeypatch.setattr(agreement, "check_data", compared.append)
    assert assemble(config, tmp_path).rows.identity == compared[0]


def test_a_run_that_diverges_fails(config: config_dict.ConfigDict, tmp_path: Path) -> None:
    config.steps, config.optimizer.warmup_steps, config.guard.bad_steps = 9, 0, 3
    config.optimizer.learning_rate = 1e30
    with pytest.raises(
        RunError, match="the loss or a gradient was not finite in steps . to .: lower"
    ):
        loop.train(config, tmp_path, 0.0)
    lines = read_lines(tmp_path, "train")
    bad = [line["step"] for line in lines if line["loss"] is None or "finite" in line]
    saved = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    # What was being written is complete; nothing was written after the first bad loss.
    assert len(bad) == 3 and saved == list(range(2, bad[0], 2))


@pytest.mark.parametrize("every", ["eval_every", "guard.replicas_every", "inspect.every"])
def test_a_run_that_is_asked_to_stop_is_saved(
    every: str,
    config: config_dict.ConfigDict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where work after every step is the first to learn of it; the test is made up for.

    So is a profile that has begun.
    """
    monkeypatch.setattr(profiling, "BEFORE", 0)
    config.profile.steps, config.optimizer.warmup_steps = 9, 0
    config.update_from_flattened_dict(TINY_RESNET)
    config.steps = config.eval_every = config.checkpoint.every = config.inspect.every = 10**5
    config.update_from_flattened_dict({every: 1})
    monkeypatch.setattr(signals, "stop", threading.Event())
    signals.stop.set()
    assert loop.train(config, tmp_path, 0.0) is None
    step = int(capsys.readouterr().out.split("stopped after step ")[1].split(",")[0])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(step)]
    assert step not in [line["step"] for line in read_lines(tmp_path, "exchange")]
    assert step <= 2 and len(list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))) == 1
    config.profile.steps = 0
    signals.stop.clear()
    config.checkpoint.resume = True
    for config.steps in (step + 1, step + 2):  # the test at the end of the first stays
        assert loop.train(config, tmp_path, 0.0) is not None
    tests = [line["step"] for line in read_lines(tmp_path, "test")]
    assert tests == list(range(1 if every == "eval_every" else step + 1, step + 3))


@pytest.fixture
def fashion() -> str | None:
    """Where Fashion-MNIST is, if it is."""
    path = os.environ.get("TFDS_DATA_DIR")
    return path if path and (Path(path) / "fashion_mnist").is_dir() else None


# Others run elsewhere: digits_vit on several processes, digits_one_bit_adam in test_watched.py.
# Of those that are slow, the networks learn in test_memorise.py, and their methods run here.
SLOW = ("digits_vit", "digits_one_bit_adam", "cifar_resnet110", "cifar_alexnet", "cifar_vgg")
SLOW += ("imagenet_resnet50", "imagenet_resnet101", "imagenet_vit_b16", "text_lstm")


@pytest.mark.parametrize(
    "name",
    ["digits_majority", "digits_ef_sign", "digits_cnat", "digits_oktopk"]
    + ["digits_vit_one_bit", "digits_vit_local", "fashion_resnet", "cifar_resnet20"]
    + ["lm_transformer", "lm_transformer_local", "text_bert", "imagenet_vit_s16"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in SLOW],
)
def test_every_config_runs(
    name: str,
    config: config_dict.ConfigDict,
    tmp_path: Path,
    fashion: str | None,
    imagenet_dir: str,
) -> None:
    other = read_config(name)
    for field in ("steps", "eval_every", "measure_steps", "checkpoint", "network"):
        other[field] = config[field]
    other.optimizer.warmup_steps = config.optimizer.warmup_steps
    other.data.data_dir = config.data.data_dir
    if other.data.name == "fashion_mnist":
        if fashion is None:
            pytest.skip("Fashion-MNIST is not prepared in TFDS_DATA_DIR")
        other.data.data_dir = fashion
        other.data.train_split = "train[:512]"
    if other.data.name == "cifar10":
        cifar.shrink(other, name)
    if other.data.name == "digits":
        other.update_from_flattened_dict(TINY_VIT if "vit" in name else TINY_RESNET)
    other.sync.every = min(other.sync.every, other.steps)
    if name == "digits_oktopk":
        other.sync.dense_steps = 2  # As cifar_vgg has them, the others do not.
    if name not in ("lm_transformer", "imagenet_vit_s16"):
        other.inspect.every = 0  # The others' methods are watched in test_watched.py.
    if other.data.name == "python_topics":
        other.update_from_flattened_dict(TINY_TEXT[name])
        # In one form; tests/train/test_split.py compares all three.
        other.sync.fsdp = 4 if name == "lm_transformer" else 1
    if other.data.name == "imagenet2012":
        imagenet.shrink(other, name, imagenet_dir)
    summary = loop.train(other, tmp_path, 0.0)
    assert 0 <= summary["test_accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.multiprocess
def test_simulated_devices_evaluate_all_images(program: Program, tmp_path: Path) -> None:
    """As somebody starts it who has set nothing: evaluation runs far ahead of its results."""
    launched = program.start(
        "train",
        "--config=configs/cifar_resnet20.py",
        f"--workdir={tmp_path}",
        "--config.steps=2",
        "--config.optimizer.warmup_steps=1",
        "--config.measure_steps=1",
        "--config.data.train_split=train[:1024]",
        devices=8,
        NPROC="",
        TFDS_DATA_DIR=cifar.data_dir(),
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    stdout, stderr = launched.communicate(timeout=280)
    assert launched.returncode == 0, stderr
    assert json.loads(stdout.splitlines()[-1])["test_images"] == 10_000


def wire_bytes(name: str, world: int) -> float:
    """Bytes a device sends in a step of one block: formulas of direct bf16, of f32 all-reduces.

    Weights travel as bf16, padded to equal blocks; biases (also those of heads, which are matrices)
    and scales as float32, and so do the loss, the accuracy and whether to stop.
    """
    config = read_config(name)
    config.model.depth = 1
    _, params = models.build(config.model, (8, 8, 1), 10, 0)
    sizes = {False: 0, True: 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        is_small = leaf.ndim <= 1 or "bias" in jax.tree_util.keystr(path)
        sizes[is_small] += leaf.size
    hops = 2 * (world - 1) / world
    return hops * (2 * sizes[False] + 4 * sizes[True] + 4 * 3)


def process_id(pid: int) -> str:
    """What follows --process_id= in the command of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("process_id=")[-1].strip("\0")


@pytest.mark.multiprocess
def test_three_processes(program: Program, tmp_path: Path) -> None:
    launcher = program.start(
        "train.launch",
        "--processes=3",
        "--",
        "--config=configs/digits_vit.py",
        f"--workdir={tmp_path}",
        "--config.batch_size=48",
        "--config.model.depth=1",
        "--config.steps=8",
        "--config.optimizer.warmup_steps=4",
        "--config.measure_steps=20",
        "--config.checkpoint.every=4",
    )
    deadline, numbers = time.monotonic() + 20, {}
    while set(numbers.values()) != set("012"):  # Until all have become the training program.
        assert time.monotonic() < deadline, numbers
        numbers = {pid: process_id(pid) for pid in children(launcher.pid)}
    assert len(numbers) == 3

    stdout, stderr = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, stderr
    summary = json.loads(stdout.splitlines()[-1])
    assert (summary["devices"], summary["processes"]) == (3, 3)
    assert stderr.count("8/8") == 1  # One progress bar.
    assert "=" not in stderr.splitlines()[0] and "Gloo" not in stdout + stderr  # No noise.
    assert [line["step"] for line in read_lines(tmp_path, "train")] == list(range(1, 9))
    assert read_lines(tmp_path, "summary")[0]["test_accuracy"] == summary["test_accuracy"]

    expected = wire_bytes("digits_vit", 3) / summary["params"]
    assert summary["bytes_per_param"] == pytest.approx(expected, rel=1e-3)
    # On the interface come the headers of TCP and gloo, and acknowledgements.
    assert summary["interface"] == "lo"
    assert expected <= summary["interface_bytes_per_param"] <= 1.15 * expected


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_that_a_scheduler_starts(program: Program, tmp_path: Path) -> None:
    """What srun sets for one process on each of two nodes; no flag says that there are two."""
    processes = [
        program.start(
            "train",
            "--config=configs/digits_resnet.py",
            f"--workdir={tmp_path}",
            "--config.steps=2",
            "--config.optimizer.warmup_steps=1",
            "--config.measure_steps=4",
            "--config.network.gigabits=1",
            SLURM_JOB_ID=str(os.getpid()),  # The port follows from it.
            SLURM_STEP_NODELIST="localhost",
            SLURM_NTASKS="2",
            SLURM_PROCID=str(i),
            SLURM_LOCALID="0",
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert json.loads(outputs[0][0].splitlines()[-1])["processes"] == 2
    assert "{" not in outputs[1][0]  # Process 0 speaks for both.


def test_what_is_predicted_is_the_exchange_of_late_steps(
    config: config_dict.ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the state that the run ends with; and nothing where most steps have no exchange."""
    seen: list[int] = []

    def codes_ms(exchange: Any, at: Any, params: Any) -> float:
        del exchange, params
        seen.extend(int(leaf) for leaf in jax.tree.leaves(at) if leaf.ndim == 0)
        return 1.0

    monkeypatch.setattr(predicting, "codes_ms", codes_ms)
    config.sync.dense_steps = 2
    assert loop.train(config, tmp_path / "dense", 0.0)["predicted_ms"] >= 1
    assert config.steps in seen
    config.sync.dense_steps, config.sync.every = None, 2
    assert loop.train(config, tmp_path / "local", 0.0)["predicted_ms"] is None


def test_the_planner_chooses_the_exchange(
    config: config_dict.ConfigDict,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By known costs and times, so that the choice is known; a resumed run keeps it."""
    times = lambda mesh, runs, repeats: {m: 1.0 + (m.family != "bfloat16") for m in runs}  # noqa: E731
    monkeypatch.setattr(timing, "_medians", times)
    local = {"float32": 1e-9, "bfloat16": 1e-9, "cnat": 1e-9, "int8": 1e-3}
    pairs = {family: (seconds, seconds) for family, seconds in local.items()}
    slow = plan.Costs("a test", 1e-6, 1e-3, 1.0, False, 0.0, False, False, 0.0, pairs)
    slow.save(tmp_path / "costs.yaml")
    config.sync.method, config.network.costs = "auto", str(tmp_path / "costs.yaml")
    summary = loop.train(config, tmp_path / "run", 0.0)
    printed = capsys.readouterr().out
    assert printed.startswith("config.sync.method=auto\nSend 16 bits, bfloat16/direct: ")
    assert 3.4 < summary["bytes_per_param"] < 3.8  # 2 * 7/8 * 2 bytes, and biases
    assert summary["predicted_ms"] > 0 and summary["predicted_largest"] in printed
    config.network.costs, config.checkpoint.resume = "no/such/file.yaml", True
    assert loop.train(config, tmp_path / "run", 0.0)["test_accuracy"] == summary["test_accuracy"]
    config.checkpoint.resume = False
    with pytest.raises(UserError, match="config.network: .*no/such/file.yaml"):
        loop.train(config, tmp_path / "new", 0.0)
