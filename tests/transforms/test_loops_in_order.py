"""On CPUs, all that is sent comes before or after the loops that send, so no device waits alone."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm._order import tied, zero_of
from transforms.scanned_layers import WIDTH, WORLD, Params, batch, block, initial, mesh_of, program

SENDS = re.compile(r" (?:all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(")


def with_head(params: Params, batch: Any) -> jax.Array:
    x, _ = jax.lax.scan(block, batch[0] @ params["embed"], params["blocks"])
    return jnp.mean((x @ params["head"] - batch[1]) ** 2)


def computations(text: str) -> Iterator[tuple[str, str]]:
    """The names and texts of the computations of a compiled program; the last is the entry."""
    for part in re.split(r"\n(?=%|ENTRY )", text):
        if found := re.match(r"(?:ENTRY )?%([\w.\-]+) ", part):
            yield found[1], part


def not_in_order(text: str) -> list[str]:
    """What the entry sends that needs nothing of a loop that sends, and that the loop needs not."""
    parts = dict(computations(text))
    entry = next(part for part in parts.values() if part.startswith("ENTRY"))
    needs, loops, sends = {}, [], []
    for line in entry.splitlines()[1:]:
        if not (found := re.match(r"\s*(?:ROOT )?%([\w.\-]+) = ", line)):
            continue
        name = found[1]
        operands = set(re.findall(r"%([\w.\-]+)", line[found.end() :])) & set(needs)
        needs[name] = operands.union(*(needs[operand] for operand in operands))
        body = re.search(r" while\(.*body=%([\w.\-]+)", line)
        if body and SENDS.search(parts[body[1]]):
            loops.append(name)
        elif SENDS.search(line):
            sends.append(name)
    assert loops and sends, (loops, sends)
    return [s for s in sends for loop in loops if loop not in needs[s] and s not in needs[loop]]


@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_nothing_is_sent_beside_the_loop_of_layers(codec: str, microbatches: int) -> None:
    """The loss and a head, whose gradient is known before those of the layers."""
    mean = jaxcomm.mean("data", codec, bucket_mib=1e-4)  # head and embedding apart
    exchange = jaxcomm.in_backward(mean, ["blocks"])
    head = np.eye(WIDTH, dtype=np.float32)
    with jax.set_mesh(mesh_of()):
        params = jaxcomm.replicate({**initial(), "head": head})
        step = jax.jit(program(exchange, with_head, microbatches))
        data = jaxcomm.global_batch(batch(), "data")
        text = step.lower(params, exchange.init(params), data).compile().as_text()
    assert WORLD > 1 and not_in_order(text) == []


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4)])
@pytest.mark.parametrize("word", [0.5, np.nan, np.inf])
def test_what_is_tied_stays_and_waits(shape: tuple[int, ...], word: float) -> None:
    x, y = np.random.default_rng(0).standard_normal(shape).astype(np.float32), np.float32([word, 1])
    tie = jax.jit(lambda x, y: tied(x, zero_of(y))).lower(x, y).compile()
    np.testing.assert_array_equal(tie(x, y), x)
    assert re.search(r"dynamic-(?:update-)?slice", tie.as_text())  # else y would not be needed
