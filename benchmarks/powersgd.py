"""PowerSGD beside PyTorch's hook at equal bytes: losses of the same runs, side by side.

    python -m benchmarks.powersgd [--ranks=1,4] [--rates=0.05,0.1,0.2] [--seeds=0,1,2]
        [--steps=300] [--dense=2] [--peers=PYTHON] [--out=JSON]

A perceptron of 64-256-256-10 on scikit-learn's digits, in float32, with SGD and momentum 0.9. Four
devices hold different classes: device i those congruent to i. Both sides start from the same
weights and draw the same batches. Ours is `jaxcomm.low_rank_mean` on four simulated devices;
PyTorch's is DistributedDataParallel with `powerSGD_hook` on four processes over gloo, with the
defaults of its state: minimal compression 2, error feedback, warm start. Both compress the same
matrices at the same rank and take the mean in the first `--dense` steps (the hook needs two), so
they send the same number of values.

Rank 0 is the float32 mean, where both sides must agree; no exchange is the control that must fail.
PyTorch runs in a Python of its own (`make peers`).
"""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import count, new_file, positive, several, whole

WORLD, BATCH, MOMENTUM = 4, 16, 0.9
WIDTHS = (64, 256, 256, 10)
PEERS = Path(__file__).parents[1] / ".venv-peers/bin/python"
Problem = dict[str, np.ndarray]
Run = tuple[int, float, int]  # rank, learning rate, seed


def problem(seeds: Sequence[int], steps: int) -> Problem:
    """Images and labels of the devices and of the test; of each seed batches and weights."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:360], order[360:]
    parts = [train[labels[train] % WORLD == device] for device in range(WORLD)]
    rows = np.stack([part[: min(map(len, parts))] for part in parts])
    made = {"x": images[rows], "y": labels[rows], "test_x": images[test], "test_y": labels[test]}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        made[f"draws{seed}"] = rng.integers(0, rows.shape[1], (steps, WORLD, BATCH))
        for i, (m, n) in enumerate(zip(WIDTHS, WIDTHS[1:], strict=False)):
            made[f"w{i}_{seed}"] = rng.normal(0, math.sqrt(2 / m), (m, n)).astype(np.float32)
    return made


def bytes_per_step(rank: int) -> float:
    """What a device sends for each weight in a compressed step, by the rule that both follow."""
    sides = list(zip(WIDTHS, WIDTHS[1:], strict=False))
    thin = [(m + n) * rank if rank else m * n for m, n in sides]
    values = sum(thin) + sum(WIDTHS[1:])
    return 8 * (WORLD - 1) / WORLD * values / (sum(m * n for m, n in sides) + sum(WIDTHS[1:]))


def _fits(rank: int) -> bool:
    """Whether factors of this rank are less than half of every matrix; both leave others whole."""
    return all(2 * (m + n) * rank < m * n for m, n in zip(WIDTHS, WIDTHS[1:], strict=False))


def ours(made: Problem, runs: Sequence[Run], dense: int) -> list[tuple[float, float]]:
    """The training and test loss of each run; of rank -1 without an exchange."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxcomm

    jaxcomm.simulate_devices(WORLD)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for i, (w, b) in enumerate(params):
            x = x @ w + b
            x = jax.nn.relu(x) if i < len(params) - 1 else x
        return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()

    def program(rank: int) -> Callable[..., Any]:
        exchange = {0: jaxcomm.mean("data"), -1: jaxcomm.no_exchange("data")}.get(rank)
        exchange = exchange or jaxcomm.low_rank_mean("data", rank, dense_steps=dense)
        tx = optax.chain(exchange, optax.trace(MOMENTUM))

        def step(carry: Any, draws: jax.Array, rate: jax.Array) -> Any:
            def one(params: Any, batch: Any) -> jax.Array:
                return loss(params, *jax.tree.map(lambda a: a[0], batch))

            params, state = carry
            batch = tuple(jax.vmap(lambda a, d: a[d])(a, draws) for a in (made["x"], made["y"]))
            value, grads = jaxcomm.value_and_grad(one, "data")(params, batch)
            updates, state = tx.update(grads, state, params)
            params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
            return (params, state), value

        @jax.jit
        def train(params: Any, draws: jax.Array, rate: jax.Array) -> Any:
            start = params, tx.init(params)
            (params, _), losses = jax.lax.scan(lambda c, d: step(c, d, rate), start, draws)
            return losses[-50:].mean(), loss(params, made["test_x"], made["test_y"])

        return train

    made = {
        name: jnp.asarray(a, jnp.int32 if a.dtype == np.int64 else None) for name, a in made.items()
    }
    found, programs = [], {rank: program(rank) for rank, _, _ in runs}
    with jax.set_mesh(jaxcomm.data_mesh()):
        for rank, rate, seed in runs:
            weights = [made[f"w{i}_{seed}"] for i in range(len(WIDTHS) - 1)]
            params = jaxcomm.replicate([(w, jnp.zeros(w.shape[1])) for w in weights])
            train, last = programs[rank](params, made[f"draws{seed}"], jnp.float32(rate))
            found.append((float(train), float(last)))
    return found


def theirs(folder: Path) -> None:
    """A process of PyTorch; the first prints its version and the losses of each run."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    task, made = json.loads((folder / "task.json").read_text()), np.load(folder / "problem.npz")
    tensors = {name: torch.from_numpy(made[name]) for name in made.files}
    dist.init_process_group("gloo")
    device = dist.get_rank()
    if device == 0:
        print(torch.__version__, flush=True)
    for rank, rate, seed in task["runs"]:
        model = hooked(tensors, seed, rank, task["dense"])
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
        losses = []
        for drawn in tensors[f"draws{seed}"]:
            optimizer.zero_grad()
            x, y = tensors["x"][device, drawn[device]], tensors["y"][device, drawn[device]]
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        last = torch.stack(losses[-50:]).mean()
        dist.all_reduce(last)
        with torch.no_grad():
            outputs = model.module(tensors["test_x"])
        test = torch.nn.functional.cross_entropy(outputs, tensors["test_y"])
        if device == 0:
            print(json.dumps([last.item() / WORLD, test.item()]), flush=True)
    dist.barrier()
    os._exit(0)  # threads of DDP's hooks are still there, and now and then abort a normal exit


def hooked(tensors: Any, seed: int, rank: int, dense: int) -> Any:
    """The perceptron under DDP, in one bucket: with several, the hook hangs on gloo."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    layers: list[Any] = []
    for i, (m, n) in enumerate(zip(WIDTHS, WIDTHS[1:], strict=False)):
        layers += [torch.nn.Linear(m, n), torch.nn.ReLU()]
        with torch.no_grad():
            layers[-2].weight.copy_(tensors[f"w{i}_{seed}"].T)
            layers[-2].bias.zero_()
    model = DistributedDataParallel(torch.nn.Sequential(*layers[:-1]), bucket_cap_mb=1 << 10)
    if rank:
        state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=dense)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def run_torch(
    python: str, made: Problem, runs: Sequence[Run], dense: int
) -> tuple[str, list[list[float]]]:
    """PyTorch's version, and what the workers found."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        folder = Path(name)
        np.savez(folder / "problem.npz", allow_pickle=False, **made)
        (folder / "task.json").write_text(json.dumps({"runs": runs, "dense": dense}))
        free.bind(("localhost", 0))
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        command = [python, "-m", "benchmarks.powersgd", f"--worker={folder}"]
        workers = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **shared, "RANK": str(i), "WORLD_SIZE": str(WORLD)},
            )
            for i in range(WORLD)
        ]
        lines = workers[0].communicate()[0].splitlines()
        if any([worker.wait() for worker in workers]):
            raise SystemExit("powersgd: a process of PyTorch failed; its message is above.")
    return lines[0], [json.loads(line) for line in lines[1:]]


def show(rows: list[dict[str, Any]]) -> None:
    """Means over the seeds, and each seed's test loss."""
    layout = "{:<12} {:>6} {:>6} {:>9} {:>9}  {}"
    print(layout.format("", "bytes", "rate", "training", "test", "test loss of each seed"))
    for key in dict.fromkeys((row["rank"], row["rate"], row["side"]) for row in rows):
        own = [row for row in rows if (row["rank"], row["rate"], row["side"]) == key]
        name = {0: "float32", -1: "no exchange"}.get(key[0], f"rank {key[0]}")
        means = [
            f"{np.mean([row[of] for row in own]):.4f}" for of in ("training_loss", "test_loss")
        ]
        each = key[2].ljust(8) + " ".join(f"{row['test_loss']:.4f}" for row in own)
        print(layout.format(name, f"{own[0]['bytes_per_step']:.3f}", f"{key[1]:g}", *means, each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=several(count), default=[1, 4])
    parser.add_argument("--rates", type=several(positive), default=[0.05, 0.1, 0.2])
    parser.add_argument("--seeds", type=several(whole), default=[0, 1, 2])
    parser.add_argument("--steps", type=count, default=300)
    parser.add_argument("--dense", type=count, default=2, help="steps with the mean, at least 2")
    parser.add_argument("--peers", default=str(PEERS), help="a Python that has torch")
    parser.add_argument("--out", type=new_file, default=None)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    most = max(rank for rank in range(1, min(WIDTHS)) if _fits(rank))
    if max(args.ranks) > most:
        parser.error(f"--ranks: {max(args.ranks)} leaves matrices as they are; at most {most}")
    if args.dense < 2:
        parser.error(f"--dense={args.dense}: at least 2, as PyTorch's hook needs")
    if args.worker:
        theirs(args.worker)
    if not Path(args.peers).exists():
        raise SystemExit(f"powersgd: there is no {args.peers}; `make peers` installs PyTorch.")
    made = problem(args.seeds, args.steps)
    runs = [(k, r, s) for k in (0, *args.ranks) for r in args.rates for s in args.seeds]
    control = [(-1, args.rates[0], seed) for seed in args.seeds]
    version, losses = run_torch(args.peers, made, runs, args.dense)
    found = {"PyTorch": losses, "ours": ours(made, [*runs, *control], args.dense)}
    rows = []
    for i, (rank, rate, seed) in enumerate([*runs, *control]):
        for side in ("ours", "PyTorch") if rank >= 0 else ("ours",):
            row = {"side": side, "rank": rank, "rate": rate, "seed": seed}
            row |= {"bytes_per_step": bytes_per_step(rank) if rank >= 0 else 0.0}
            rows.append(
                row | dict(zip(("training_loss", "test_loss"), found[side][i], strict=True))
            )
    show(rows)
    if args.out:
        from benchmarks.netlab.measuring import circumstances

        kept = {**circumstances("benchmarks.powersgd"), "rows": rows}
        kept["versions"]["torch"] = version
        args.out.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    sys.exit(main())
