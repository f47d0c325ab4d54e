"""What an exchange takes, from what its messages and its codes take by themselves behind a step.

`behind` makes the programs that `measure.measure_steps` runs behind steps without exchange. There
they find what an exchange finds: processes that still compute, on the cores that they share.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm import plan
from train import sync

# What runs behind a step.
NOTHING, MESSAGES, CODES = "nothing", "messages", "codes"


class Predicted(NamedTuple):
    """What an exchange takes, in milliseconds.

    Attributes:
      latency_ms: of messages that wait for each other; the first one, for processes that compute.
      bytes_ms: of what the busiest device sends.
      local_ms: of encoding, decoding, and whatever else a device does by itself.
    """

    latency_ms: float
    bytes_ms: float
    local_ms: float

    @property
    def ms(self) -> float:
        """All together: on CPU, they follow one another."""
        return self.latency_ms + self.bytes_ms + self.local_ms

    @property
    def largest(self) -> str:
        """The part that takes most of it."""
        names = dict(zip(("latency", "bytes", "encoding and decoding"), self, strict=True))
        return max(names, key=lambda name: names[name])


def behind(
    wire: jaxcomm.WireReport, exchange: Any | None, params: Any
) -> dict[str, Callable[[], Any]]:
    """Programs to run behind a step; none on a single device.

    Args:
      wire: of the compiled step.
      exchange: the transformation; None where most steps have none.
      params: the parameters.
    """
    if jax.sharding.get_mesh().size == 1:
        return {}
    programs = {
        NOTHING: _with_oneself(jaxcomm.no_exchange(sync.AXIS), params),
        MESSAGES: _messages(_usual(wire)),
    }
    if exchange:
        programs[CODES] = _with_oneself(exchange, params)
    return programs


def predicted(
    wire: jaxcomm.WireReport, behind_ms: Mapping[str, float], gigabits: float | None
) -> Predicted | None:
    """What the exchange of a compiled step takes.

    What every program takes, whatever it does, is taken off: a step starts one, with or without an
    exchange. Of what messages take, bytes have the part that `plan.probe` measures for them.

    Args:
      wire: of the compiled step.
      behind_ms: what the programs of `behind` take behind a step.
      gigabits: that a device sends in a second, in place of what it does here; None is the latter.

    Returns:
      The prediction; None for a single device.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.size == 1:
        return None
    start, usual = behind_ms[NOTHING], _usual(wire)
    costs = dataclasses.replace(plan.probe(mesh, families=()), latency=0.0)
    bytes_ms = 1e3 * plan.seconds_of(usual, costs)
    latency_ms = max(behind_ms[MESSAGES] - start - bytes_ms, 0.0) if usual.collectives else 0.0
    if gigabits is not None:
        costs = dataclasses.replace(costs, per_byte=8e-9 / gigabits)
        bytes_ms = 1e3 * plan.seconds_of(usual, costs)
    return Predicted(latency_ms, bytes_ms, max(behind_ms.get(CODES, start) - start, 0.0))


def _usual(wire: jaxcomm.WireReport) -> jaxcomm.WireReport:
    """What is sent where every conditional takes the branch that sends least: no dense steps."""
    while wire.conditionals:
        name, _ = wire.conditionals[0]
        branches = [report for (at, _), report in wire.by_branch().items() if at == name]
        wire = min(branches, key=lambda report: float(report.bytes_max))
    return wire


def _messages(wire: jaxcomm.WireReport) -> Callable[[], Any]:
    """Runs the messages of a program, and nothing else."""
    program, rows = _program(wire)
    jax.block_until_ready(program(rows))
    return lambda: program(rows)


def _program(wire: jaxcomm.WireReport) -> tuple[Any, jax.Array]:
    """The same operations of the same sizes between the same devices, and what they begin with."""
    mesh = Mesh(jax.sharding.get_mesh().devices.ravel(), "devices")

    def all_of_them(x: jax.Array) -> jax.Array:
        for collective in wire.collectives:
            for _ in range(collective.times or 0):
                x = _sent(collective, x)
        return x

    spec = PartitionSpec("devices")
    with jax.set_mesh(mesh):
        rows = jax.jit(lambda: jnp.ones(mesh.size), out_shardings=NamedSharding(mesh, spec))()
        body = jax.shard_map(all_of_them, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(body).lower(rows).compile(), rows


def _sent(collective: Any, x: jax.Array) -> jax.Array:
    """A value that depends on `x` and on an operation of as many bytes, which depends on `x`."""
    groups: dict[str, Any] = {"axis_index_groups": [list(group) for group in collective.groups]}
    own = [x + jnp.arange(words, dtype=jnp.float32) for words in _words(collective)]
    match collective.op:
        case "all-reduce":
            others = jax.lax.psum(own, "devices", **groups)
        case "all-gather":
            others = jax.lax.all_gather(own, "devices", **groups)
        case "reduce-scatter":
            others = jax.lax.psum_scatter(own, "devices", tiled=True, **groups)
        case "all-to-all":
            others = [jax.lax.all_to_all(o, "devices", 0, 0, tiled=True, **groups) for o in own]
        case "collective-permute":
            others = jax.lax.ppermute(own, "devices", collective.groups)
        case _:
            raise NotImplementedError(f"no exchange of jaxcomm has a {collective.op}.")
    ends = [(flat[0] + flat[-1]) / flat.size for flat in map(jnp.ravel, others)]
    return x + sum(ends)


def _words(collective: Any) -> list[int]:
    """The float32 values of each array that a device puts in; a multiple of a group's devices."""
    widths = [re.search(r"\d+", dtype) for dtype in collective.dtypes]  # `pred` has no digits
    size = collective.group_size
    bits = [
        math.prod(shape) * (int(width[0]) if width else 8)
        for width, shape in zip(widths, collective.shapes, strict=True)
    ]
    return [size * max(math.ceil(number / 32 / size), 1) for number in bits]


def _with_oneself(exchange: Any, params: Any) -> Callable[[], Any]:
    """An exchange on one device of each process: its codes without its messages."""
    device = jax.local_devices()[0]
    values = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), params)
    with jax.set_mesh(jaxcomm.data_mesh(sync.AXIS, [device])):
        own = jaxcomm.replicate(values)
        grads = jaxcomm.global_batch(jax.tree.map(lambda x: x[None], values), sync.AXIS)
        at = exchange.init(own)
        program = jax.jit(exchange.update).lower(grads, at, own).compile()
    jax.block_until_ready(program(grads, at, own))
    return lambda: program(grads, at, own)
