"""What a conditional costs on CPU: kinds of steps by the state's count, and as the host says.

    python -m benchmarks.due [--params=4e6] [--rounds=12] [--out=JSON]

A perceptron of layers of 1024 x 1024 on two simulated devices, 8 rows each: `multi_steps` and
`local_steps` with an exchange in every 4th step, and `one_bit_adam` and `dense_first` (int4, with
Adam behind) after a dense step. `by count` is one program with a conditional; `told` are two,
chosen by the loop with `due=` or `dense=`. Steps of both alternate, and times are medians. Nothing
is sent over a network.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from benchmarks.arguments import count, new_file, values
from benchmarks.netlab.measuring import guarded, keep
from benchmarks.netlab.methods import SIDE, shapes_of

NAME = "benchmarks.due"
DEVICES, ROWS, EVERY, WARM = 2, 8, 4, 2  # WARM rounds are not timed
METHODS: dict[str, Callable[[], Any]] = {
    "multi_steps": lambda: jaxcomm.multi_steps(
        optax.chain(jaxcomm.mean("data", "int4", error_feedback=True), optax.adam(1e-3)), EVERY
    ),
    "local_steps": lambda: jaxcomm.local_steps(
        optax.adam(1e-3, b1=0.5),
        EVERY,
        optax.sgd(1.0, momentum=0.75, nesterov=True),
        jaxcomm.mean("data", "scaled_sign", error_feedback=True),
    ),
    "one_bit_adam": lambda: jaxcomm.one_bit_adam("data", 1e-3, dense_steps=1),
    "dense_first": lambda: optax.chain(
        jaxcomm.dense_first(jaxcomm.mean("data", "int4", error_feedback=True), 1), optax.adam(1e-3)
    ),
}
DENSE = ("one_bit_adam", "dense_first")


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--params", type=values, default="4e6", help="weights of the perceptron")
    parser.add_argument("--rounds", type=count, default=12, help=f"of {EVERY} steps")
    parser.add_argument("--out", type=new_file, help="a JSON file that the rows are kept in")
    args = parser.parse_args()
    return guarded("due", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    jaxcomm.simulate_devices(DEVICES)
    jax.set_mesh(jaxcomm.data_mesh())
    rows = []
    for name, make in METHODS.items():
        loops = {"by count": Loop(make(), args.params), "told": Loop(make(), args.params)}
        kinds = bits if name in DENSE else exchanges
        found = times(loops, kinds, args.rounds)
        rows += [{"name": f"{name}, {kind}", "ms": ms} for kind, ms in found.items()]
    for row in rows:
        print(f"{row['name']:40}{row['ms']:8.1f} ms")
    keep(args.out, NAME, "2 devices", rows, params=args.params, every=EVERY)


def exchanges(number: int) -> tuple[str, dict[str, bool]]:
    """The kind of a step, and how the loop says so."""
    is_last = number % EVERY == EVERY - 1
    return "a step that exchanges" if is_last else "a step between", {"due": is_last}


def bits(number: int) -> tuple[str, dict[str, bool]]:
    """The same, of those that begin with a dense step."""
    return "a step in bits", {"dense": number == 0}


class Loop:
    """A training loop."""

    def __init__(self, tx: Any, params: float):
        shapes, rng = shapes_of(round(params)), np.random.default_rng(0)
        start = {k: rng.standard_normal(s, np.float32) * 0.03 for k, s in shapes.items()}
        self.params = jaxcomm.replicate(start)
        self.state = tx.init(self.params)
        x = rng.standard_normal((DEVICES * ROWS, SIDE), np.float32)
        self.batch = jaxcomm.global_batch(x, "data")

        def loss_fn(params: Any, x: jax.Array) -> jax.Array:
            for name in shapes:
                x = jax.nn.relu(x @ params[name])
            return jnp.mean(x**2)

        gradient = jaxcomm.value_and_grad(loss_fn, "data")

        @functools.partial(jax.jit, static_argnames=("due", "dense"), donate_argnums=(0, 1))
        def step(params: Any, state: Any, batch: Any, **said: bool) -> Any:
            is_local = isinstance(state, jaxcomm.LocalStepsState)
            _, grads = gradient(jaxcomm.local_params(state) if is_local else params, batch)
            updates, state = tx.update(grads, state, params, **said)
            return optax.apply_updates(params, updates), state

        self.step = step

    def seconds(self, **said: bool) -> float:
        """Of a step."""
        start = time.perf_counter()
        self.params, self.state = self.step(self.params, self.state, self.batch, **said)
        jax.block_until_ready((self.params, self.state))
        return time.perf_counter() - start


def times(
    loops: dict[str, Loop], kinds: Callable[[int], tuple[str, dict[str, bool]]], rounds: int
) -> dict[str, float]:
    """Milliseconds of the steps of each kind."""
    found: dict[str, list[float]] = {}
    for number in range((rounds + WARM) * EVERY):
        kind, said = kinds(number)
        for name, loop in loops.items():
            seconds = loop.seconds(**(said if name == "told" else {}))
            if number >= WARM * EVERY:
                found.setdefault(f"{kind}, {name}", []).append(1e3 * seconds)
    return {name: statistics.median(ms) for name, ms in sorted(found.items())}


if __name__ == "__main__":
    sys.exit(main())
