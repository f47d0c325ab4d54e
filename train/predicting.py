"""The time of an exchange, from the times of its messages and its local work alone.

`messages` sends, in a step without exchange, what a step with one sends. So these messages meet the
same conditions as an exchange: processes that still compute on shared cores. `codes_ms` times the
exchange alone.
"""

import dataclasses
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from jaxcomm import plan
from train import measure, sync

# The seconds that a row of timed codes takes, because processes that share cores take turns; the
# number of rows; and the seconds after which no further row begins.
ROW, ROWS, LONGEST = 0.1, 20, 4.0

INVISIBLE = 1e-30  # Times a value, added to updates so that the value is computed.


class Predicted(NamedTuple):
    """What an exchange takes, in milliseconds.

    Attributes:
      latency_ms: the time of messages waiting for each other, and of the first one waiting for
        processes that compute.
      bytes_ms: the time of the bytes that the busiest device sends.
      local_ms: the time of encoding, decoding, and all other local work of a device.
    """

    latency_ms: float
    bytes_ms: float
    local_ms: float

    @property
    def ms(self) -> float:
        """The sum: on CPU, the parts follow one another."""
        return self.latency_ms + self.bytes_ms + self.local_ms

    @property
    def largest(self) -> str:
        """The part that takes the most time."""
        names = dict(zip(("latency", "bytes", "encoding and decoding"), self, strict=True))
        return max(names, key=lambda name: names[name])


def messages(wire: jaxcomm.WireReport, without: jaxcomm.WireReport) -> optax.GradientTransformation:
    """Sends as many bytes by the same operations as an exchange, and leaves updates unchanged.

    Args:
      wire: the report of the step with the exchange.
      without: the report of the step without it, which sends its own messages.
    """
    added = _added(_least(wire), without)

    def update(updates: Any, params: Any = None) -> Any:
        del params
        firsts = [jnp.ravel(leaf)[0].astype(jnp.float32) for leaf in jax.tree.leaves(updates)]
        spec = jax.P()
        send = jax.shard_map(_all_sent, in_specs=spec, out_specs=spec, check_vma=False)
        sent = send(jnp.stack(firsts).sum())  # when every leaf is ready
        return jax.tree.map(lambda leaf: leaf + (sent * INVISIBLE).astype(leaf.dtype), updates)

    def _all_sent(x: jax.Array) -> jax.Array:
        for message in added:
            x = _sent(message, x)
        return x

    return optax.stateless(update)


def codes_ms(exchange: Any, at: Any, params: Any) -> float:
    """How much longer an exchange takes than its messages, each alone, in milliseconds.

    This is what devices do between messages, and the wait for the slowest: devices that share cores
    cannot all run at once.

    Args:
      exchange: the transformation.
      at: its state; late steps may take another branch than the first ones.
      params: the parameters.
    """
    programs = _by_itself(exchange, at, params)
    once = _mean_seconds(programs, 1)
    number = max(math.ceil(ROW / measure.slowest(max(once))), 1)
    rows: list[list[float]] = []
    begin = time.perf_counter()
    while len(rows) < ROWS and measure.slowest(time.perf_counter() - begin) < LONGEST:
        rows.append(_mean_seconds(programs, number))
    whole, messages = map(measure.usual, zip(*rows, strict=True))
    return 1e3 * measure.slowest(max(whole - messages, 0.0))


def _mean_seconds(programs: list[Callable[[], Any]], number: int) -> list[float]:
    """The mean time of each program when it runs several times in a row."""
    seconds = []
    for program in programs:
        measure.barrier()
        started = time.perf_counter()
        for _ in range(number):
            jax.block_until_ready(program())
        seconds.append((time.perf_counter() - started) / number)
    return seconds


def predicted(
    wire: jaxcomm.WireReport,
    without: jaxcomm.WireReport,
    messages_ms: float,
    local_ms: float,
    gigabits: float | None,
) -> Predicted:
    """The predicted time of the exchange of a compiled step.

    Of the messages' time, the part for bytes is what `plan.probe` measures for them.

    Args:
      wire: the report of the step.
      without: the report of the step without exchange.
      messages_ms: what `messages` add to the step without exchange.
      local_ms: the result of `codes_ms`.
      gigabits: the gigabits that a device sends in a second; None means what it sends here.
    """
    costs = dataclasses.replace(plan.probe(jax.sharding.get_mesh(), families=()), latency=0.0)

    def bytes_ms(costs: plan.Costs) -> float:
        return 1e3 * (plan.seconds_of(_least(wire), costs) - plan.seconds_of(without, costs))

    latency_ms = max(messages_ms - bytes_ms(costs), 0.0)
    if gigabits is not None:
        costs = dataclasses.replace(costs, per_byte=8e-9 / gigabits)
    return Predicted(latency_ms, bytes_ms(costs), local_ms)


def _least(wire: jaxcomm.WireReport) -> jaxcomm.WireReport:
    """What is sent where every conditional takes the branch that sends least: no dense steps."""
    while wire.conditionals:
        name, _ = wire.conditionals[0]
        branches = [report for (at, _), report in wire.by_branch().items() if at == name]
        wire = min(branches, key=lambda report: float(report.bytes_max))
    return wire


class _Message(NamedTuple):
    """An operation, its groups of devices, and dtype and shape of what a device contributes."""

    op: str
    groups: Any
    operands: tuple[tuple[str, tuple[int, ...]], ...]


def _listed(wire: jaxcomm.WireReport) -> list[_Message]:
    """The messages of a program, one after another."""
    return [
        _Message(each.op, each.groups, tuple(zip(each.dtypes, each.shapes, strict=True)))
        for each in wire.collectives
        for _ in range(each.times or 0)
    ]


def _added(wire: jaxcomm.WireReport, without: jaxcomm.WireReport) -> list[_Message]:
    """What the first sends and the second does not: XLA joins messages of both kinds into one."""
    left = _listed(wire)
    for usual in _listed(without):
        for index, (op, groups, operands) in enumerate(left):
            if (op, groups) == usual[:2] and not Counter(usual.operands) - Counter(operands):
                rest = tuple((Counter(operands) - Counter(usual.operands)).elements())
                left[index : index + 1] = [_Message(op, groups, rest)] if rest else []
                break
    return left


def _sent(message: _Message, x: jax.Array) -> jax.Array:
    """A value that depends on `x` and on an operation of as many bytes, which depends on `x`."""
    axes = jax.sharding.get_abstract_mesh().axis_names
    groups: dict[str, Any] = {"axis_index_groups": [list(group) for group in message.groups]}
    own = [x + jnp.arange(words, dtype=jnp.float32) for words in _words(message)]
    match message.op:
        case "all-reduce":
            others = jax.lax.psum(own, axes, **groups)
        case "all-gather":
            others = jax.lax.all_gather(own, axes, **groups)
        case "reduce-scatter":
            others = jax.lax.psum_scatter(own, axes, tiled=True, **groups)
        case "all-to-all":
            joined = jnp.concatenate(own)  # The CPU compiler makes every block an operand.
            others = [jax.lax.all_to_all(joined, axes, 0, 0, tiled=True, **groups)]
        case "collective-permute":
            others = jax.lax.ppermute(own, axes, message.groups)
        case _:
            raise NotImplementedError(f"no exchange of jaxcomm has a {message.op}.")
    ends = [(flat[0] + flat[-1]) / flat.size for flat in map(jnp.ravel, others)]
    return x + sum(ends)


def _words(message: _Message) -> list[int]:
    """The float32 values of each array that a device puts in; a multiple of a group's devices."""
    size = len(message.groups[0])
    found = []
    for dtype, shape in message.operands:
        width = re.search(r"\d+", dtype)  # `pred` has no digits
        bits = math.prod(shape) * (int(width[0]) if width else 8)
        found.append(size * max(math.ceil(bits / 32 / size), 1))
    return found


def _by_itself(exchange: Any, at: Any, params: Any) -> list[Callable[[], Any]]:
    """An exchange as a separate program, and one that only sends as much, with equal arguments."""
    values = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), params)
    rows = jax.local_device_count()
    grads = sync.global_batch(jax.tree.map(lambda x: np.broadcast_to(x, (rows, *x.shape)), values))
    whole = _Called(exchange, grads, at, params)
    wire = jaxcomm.wire_report(whole.program)
    replay = messages(wire, jaxcomm.WireReport((), wire.devices))
    alone = optax.chain(jaxcomm.no_exchange(sync.AXIS), replay)
    return [whole, _Called(alone, grads, alone.init(params), params)]


class _Called:
    """The program of a transformation, and what it is called with."""

    def __init__(self, tx: Any, *arguments: Any):
        self._arguments = arguments
        self.program = jax.jit(tx.update).lower(*self._arguments).compile()

    def __call__(self) -> Any:
        return self.program(*self._arguments)
