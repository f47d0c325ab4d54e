"""Whole training steps of chains on a network, beside those of the same optimizer in float32.

    python -m benchmarks.chain_steps [--rate=200] [--params=2e6] [--repeats=5] [--out=JSON]
        [--chains=momentum,chunks]

The chains are those whose exchange does not stand right in front of the optimizer: for Adam, and
for SGD with momentum. The step is that of `python -m benchmarks.allreduce --peers`: forward,
backward, exchange and optimizer of a perceptron with so many weights, 32 rows a host. Four local
steps, one of which exchanges, are timed together. Hosts are real processes in namespaces of their
own (`benchmarks.netlab`; needs root). Each rate is a part of the JSON; some chains
of a rate are one of their own, with the float32 steps of their run.
"""

import argparse
import sys
from typing import Any

from benchmarks import take
from benchmarks.arguments import one_of, several, values
from benchmarks.netlab.flags import add_flags, add_run_flags, chosen
from benchmarks.netlab.measuring import Lab, guarded, keep
from benchmarks.netlab.methods import Step, shapes_of
from benchmarks.netlab.network import Network
from benchmarks.netlab.worker import Jax, measure

NAME = "benchmarks.chain_steps"
EVERY = 4  # local steps


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    return guarded("chain_steps", lambda: run(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_flags(parser)
    parser.set_defaults(hosts=4, rate="200")
    parser.add_argument("--params", type=values, default=2e6, help="weights of the perceptron")
    every = ",".join(take.CHAINS)
    parser.add_argument("--chains", type=several(one_of(take.CHAINS)), default=every)
    add_run_flags(parser, repeats=5)
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    made, names = (
        chosen(args),
        list(dict.fromkeys([*map(take.in_float32, args.chains), *args.chains])),
    )
    command = [sys.executable, "-m", NAME, "--worker", f"--params={args.params}"]
    command.append(f"--chains={','.join(names)}")
    with Network(made) as network:
        rows = Lab(network).rows([*command, f"--repeats={args.repeats}"], args.seconds)
    found = {row["name"]: row["ms"] for row in rows}
    for name, ms in found.items():
        print(f"{name:20}{ms:9.1f} ms{found[take.in_float32(name)] / ms:8.1f} x")
    part = f"{args.rate}/{','.join(names)}" if set(names) < set(take.CHAINS) else str(args.rate)
    keep(args.out, NAME, part, rows, params=args.params, topology=made.name)


def optimizers() -> dict[str, tuple[Any, int]]:
    """What makes updates of local gradients, by name, and the steps that are timed together."""
    import optax

    import jaxcomm
    from jaxcomm import codecs

    signs = jaxcomm.mean("data", codecs.scaled_sign(128), error_feedback=True)
    blocks_of_1024 = jaxcomm.mean("data", "scaled_sign", error_feedback=True)
    nadam = jaxcomm.local("data", optax.scale_by_adam(nesterov=True))
    momentum = jaxcomm.local("data", optax.trace(0.9, nesterov=True))
    sgd = optax.sgd(1e-3, momentum=0.9, nesterov=True)
    behind = optax.scale_by_learning_rate(1e-3)
    outer = optax.sgd(1.0, momentum=0.75, nesterov=True)
    chunks, decaying = (
        jaxcomm.sparse_mean("data", 1 / 32, "topk_chunks", residual_decay=decay)
        for decay in (1.0, 0.95)
    )
    local, sparse_local = (
        jaxcomm.local_steps(optax.adam(1e-3, b1=0.5), EVERY, outer, exchange)
        for exchange in (blocks_of_1024, decaying)
    )
    return {
        "adam": (optax.chain(jaxcomm.mean("data"), optax.adam(1e-3)), 1),
        "local_adam": (optax.chain(nadam, blocks_of_1024, behind), 1),
        "factored_adam": (jaxcomm.factored_adam(signs, 1e-3, nesterov=True), 1),
        "local_steps": (local, EVERY),
        "local_steps_chunks": (sparse_local, EVERY),
        "momentum": (optax.chain(jaxcomm.mean("data"), sgd), 1),
        "chunks": (optax.chain(chunks, sgd), 1),
        "local_momentum": (optax.chain(momentum, blocks_of_1024, behind), 1),
        "local_momentum_vote": (optax.chain(momentum, jaxcomm.majority_vote("data"), behind), 1),
    }


def work(args: argparse.Namespace) -> None:
    """What one host does."""
    together = Jax()
    import jax

    import jaxcomm

    jax.set_mesh(jaxcomm.data_mesh())
    shapes = shapes_of(round(args.params))
    made = optimizers()
    cases = [Step(name, shapes, made[name][0], steps=made[name][1]) for name in args.chains]
    measure(cases, together, args.repeats)


if __name__ == "__main__":
    sys.exit(main())
