"""What the exchange costs: steps with and without it, the bandwidth, the bytes on the interface.

All processes measure together, start each block after a barrier, and report the slowest of them: in
an all-to-all, every process but the slowest looks faster than it is.
"""

import collections
import math
import socket
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
from train import signals, sync
from train.sync import AXIS

Step = Callable[[Any, Any], tuple[Any, Any]]

# Steps with and without exchange alternate in blocks, so that other load disturbs both alike.
BLOCKS, LENGTH = 8, 8  # Blocks at least, and steps of a block at most.
LONGEST = 20.0  # Seconds for all steps; fewer are run if they are slow.
OUTLIERS = 0.1  # The share of blocks to discard at either end.
COUNTERS = Path("/proc/net/dev")  # Linux only; elsewhere no bytes are reported.


class Steps(NamedTuple):
    """Times of the same steps with and without the exchange, or a part of it.

    All are those of the slowest process.

    Attributes:
      step_ms: the time of a step.
      compute_ms: the time of a step without exchange.
      messages_ms: what the messages alone add to a step without exchange; 0 if they were not timed.
      interface: the name of the network interface that sent most, or None.
      interface_bytes: the bytes that it sent for one step and device of this machine, or None. It
        is the median of the blocks, because an interface also counts what other programs send.
    """

    step_ms: float
    compute_ms: float
    messages_ms: float
    interface: str | None
    interface_bytes: float | None


class Bandwidth(NamedTuple):
    """What one device can send.

    Attributes:
      gigabits: gigabits per second; None for a single device.
      source: where the number comes from.
    """

    gigabits: float | None
    source: str


def measure_steps(
    step: Step,
    state: Any,
    plain_step: Step,
    plain_state: Any,
    batch: Any,
    count: int,
    messages_step: Step | None = None,
    period: int = 1,
) -> Steps:
    """Times two compiled steps, or three, on one batch, in alternating blocks.

    Args:
      step: the training step, which reuses the memory of its state.
      state: its state; used up.
      plain_step: the same step without the exchange.
      plain_state: its state; used up.
      batch: a global batch.
      count: steps of each kind; fewer if all would take more than LONGEST seconds, but at least
        BLOCKS, and a whole period in any case.
      messages_step: the step without exchange but with its messages; continues from the same state.
      period: if only one in so many steps exchanges, that number; a block has whole periods.

    Returns:
      Means over the steps, without the fastest and the slowest blocks; and the traffic while only
      steps with the exchange ran.
    """
    state, first = _block(step, state, batch, 2)
    plain_state, _ = _block(plain_step, plain_state, batch, 1)
    if messages_step:
        plain_state, _ = _block(messages_step, plain_state, batch, 1)
    most = LONGEST / (3 if messages_step else 2) / slowest(min(first))
    length = min(LENGTH, max(math.ceil(min(count, most) / BLOCKS), 1))
    length = period * math.ceil(length / period)
    # With a long period there are fewer blocks, because each takes longer.
    least = BLOCKS if length <= LENGTH else min(BLOCKS, math.ceil(min(count, most) / length))
    times: dict[str, list[float]] = {name: [] for name in ("step", "plain", "messages")}
    sent: dict[str, list[int]] = collections.defaultdict(list)
    begin = time.perf_counter()
    while _goes_on(len(times["step"]), least, math.ceil(count / length), begin):
        before = _counters_at_rest()
        state, seconds = _block(step, state, batch, length)
        for name, value in _counters_at_rest().items():
            sent[name].append(value - before.get(name, value))
        times["step"].append(statistics.fmean(seconds))
        plain_state, seconds = _block(plain_step, plain_state, batch, min(length, LENGTH))
        times["plain"].append(statistics.fmean(seconds))
        if messages_step:
            plain_state, seconds = _block(messages_step, plain_state, batch, length)
            times["messages"].append(statistics.fmean(seconds))
    interface, total = busiest(sent) if jax.process_count() > 1 else (None, 0.0)
    share = length * _devices_of_this_machine()
    ms = {name: 1e3 * slowest(usual(blocks)) for name, blocks in times.items() if blocks}
    return Steps(
        step_ms=ms["step"],
        compute_ms=ms["plain"],
        messages_ms=max(ms.get("messages", 0.0) - ms["plain"], 0.0),
        interface=interface,
        interface_bytes=total / share if interface else None,
    )


def _goes_on(blocks: int, least: int, count: int, begin: float) -> bool:
    """Whether to run another block: up to `count` while there is time, and at least `least`."""
    return blocks < least or (blocks < count and slowest(time.perf_counter() - begin) < LONGEST)


def usual(seconds: Sequence[float]) -> float:
    """The mean without the shortest and the longest, which varies less than a median."""
    cut = math.ceil(OUTLIERS * len(seconds))
    return statistics.fmean(sorted(seconds)[cut:-cut] or seconds)


def bandwidth(network: Any) -> Bandwidth:
    """How fast a device sends: a number in the config, or one that is measured now.

    Args:
      network: `config.network`: `gigabits`, or None and the `probe_mib` MiB to measure with.

    Returns:
      The bandwidth; None for a single device, which sends nothing.
    """
    if jax.sharding.get_mesh().size == 1:
        return Bandwidth(None, "one device")
    if network.gigabits is not None:
        return Bandwidth(network.gigabits, "config")
    return Bandwidth(measure_gigabits(network.probe_mib), f"a mean of {network.probe_mib} MiB")


def measure_gigabits(mebibytes: int) -> float:
    """What one device sends in a second of a large exchange, XLA's f32 mean, in Gb/s.

    Args:
      mebibytes: size of the array that is averaged, large enough that latency does not count.
    """
    shape = (mebibytes, 2**18)  # MiB of float32.
    mesh = jax.sharding.get_mesh()
    exchange = jaxcomm.mean(AXIS, codec="float32", algorithm="native")
    make = jax.jit(
        lambda: jnp.ones((mesh.shape[AXIS], *shape)),
        out_shardings=NamedSharding(mesh, PartitionSpec(AXIS)),
    )
    local = make()
    state = exchange.init(jaxcomm.replicate(jnp.zeros(shape)))
    compiled = jax.jit(exchange.update).lower(local, state).compile()
    seconds = []
    for _ in range(4):  # The first one warms up.
        barrier()
        started = time.perf_counter()
        jax.block_until_ready(compiled(local, state))
        seconds.append(time.perf_counter() - started)
    sent = float(jaxcomm.wire_report(compiled).bytes_max)
    return 8e-9 * sent / slowest(float(np.median(seconds[1:])))


class Sent:
    """What a device sends in a step, by the compiled programs, for each parameter.

    Args:
      wire: the report of the last step's program.
      config: `config.sync`, with the method that is in use.
      params: the parameters.
      dense: the report of the dense steps' own program, if they have one.
      is_dense: whether a step is dense, by its number and `frozen_at` as of `in_step`.
    """

    def __init__(
        self,
        wire: jaxcomm.WireReport,
        config: Any,
        params: Any,
        dense: jaxcomm.WireReport | None = None,
        is_dense: Callable[[int, int], bool] = lambda step, frozen_at: False,
    ):
        self.wire = wire
        self._dense, self._is_dense = dense, is_dense
        self.params = sum(leaf.size for leaf in jax.tree.leaves(params))
        self._config = config
        self._known: dict[tuple[float, ...], float] = {}

    def in_step(self, step: int, frozen_at: int) -> float:
        """Bytes a parameter in a step, counted from 1; periodic exchanges count on average.

        Args:
          step: the number of the step.
          frozen_at: the earlier step in which the optimizer's warm-up ended; 0 before that.
        """
        if self._dense is not None and self._is_dense(step, frozen_at):
            return self._dense.per_step(_taken(self._dense)) / self.params
        named = {branch.name for branch in self.wire.named}
        shares = sync.shares(self._config, step, frozen_at)
        found: dict[Any, float] = {name: share for name, share in shares.items() if name in named}
        key = tuple(found.values())
        if key not in self._known:  # Cached, because every step asks.
            self._known[key] = self.wire.per_step(found | _taken(self.wire)) / self.params
        return self._known[key]

    def most(self) -> float:
        """Bytes a parameter in the step that sends most."""
        return float(max(report.bytes_max for report in self._reports())) / self.params

    def between_groups(self) -> float | None:
        """Bytes a parameter that leave a group of devices, of the step that sends most.

        None where there are no groups.
        """
        mesh = jax.sharding.get_mesh()
        if len(mesh.axis_names) < 2:
            return None
        each = [report.by_axes(mesh).items() for report in self._reports()]
        sums = [sum(part.bytes_max for axes, part in x if AXIS in axes) for x in each]
        return float(max(sums)) / self.params

    def _reports(self) -> list[jaxcomm.WireReport]:
        return [self.wire] if self._dense is None else [self.wire, self._dense]


def _taken(wire: jaxcomm.WireReport) -> dict[Any, float]:
    """The branches that steps take of conditionals that are not jaxcomm's: those that send most.

    `optax.apply_if_finite` has one: with split parameters, clipping sums squares of shards in it.
    """
    named = {branch.conditional for branch in wire.named}
    taken: dict[Any, float] = {}
    for name, count in wire.conditionals:
        if name not in named:
            sent = [
                sum(max(c.sent) for c in wire.collectives if (name, i) in c.branch)
                for i in range(count)
            ]
            taken[name, sent.index(max(sent))] = 1.0
    return taken


def costs(steps: Steps, sent: Sent, network: Bandwidth, predicted: Any = None) -> dict[str, Any]:
    """What the exchange costs, by the names of the numbers in the report.

    Args:
      steps: the result of `measure_steps`.
      sent: what the compiled step sends.
      network: the result of `bandwidth`.
      predicted: a `predicting.Predicted`, or None for a single device.

    Returns:
      Numbers; None where the platform or the number of devices leaves nothing to count.
    """
    on_interface = None
    if steps.interface_bytes is not None:
        on_interface = steps.interface_bytes / sent.params
    return {
        **sizes(sent),
        "step_ms": steps.step_ms,
        "compute_ms": steps.compute_ms,
        "communication_ms": steps.step_ms - steps.compute_ms,
        "efficiency": steps.compute_ms / steps.step_ms,
        "predicted_efficiency": predicted and steps.compute_ms / (steps.compute_ms + predicted.ms),
        "predicted_ms": predicted and predicted.ms,
        "predicted_parts_ms": predicted and predicted._asdict(),
        "predicted_largest": predicted and predicted.largest,
        "gigabits": network.gigabits,
        "gigabits_from": network.source,
        "interface": steps.interface,
        "interface_bytes_per_param": on_interface,
    }


def sizes(sent: Sent) -> dict[str, Any]:
    """What is known of the exchange before anything is measured, by names in the report."""
    return {
        "devices": sent.wire.devices,
        "processes": jax.process_count(),
        "params": sent.params,
        "rounds": sent.wire.rounds,
        "bytes_per_param": sent.most(),
        "bytes_per_param_between": sent.between_groups(),
    }


def slowest(value: float) -> float:
    """The largest value of any process.

    Raises:
      train.signals.StoppedError: in all processes, if one was asked to end after everything was
        saved.
    """
    own = np.asarray([value, signals.stop.is_set()], np.float32)
    values, asked = multihost_utils.process_allgather(own).reshape(-1, 2).T
    signals.leave_if(bool(asked.any()))
    return float(values.max())


def barrier() -> None:
    """Returns when all processes have reached it, or raises as `slowest` does."""
    slowest(0.0)


def _block(step: Step, state: Any, batch: Any, count: int) -> tuple[Any, list[float]]:
    """Runs steps one at a time."""
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - started)
    return state, seconds


def _counters_at_rest() -> dict[str, int]:
    """Bytes each interface has sent, read while no process sends."""
    barrier()
    counters = interface_counters(COUNTERS.read_text()) if COUNTERS.exists() else {}
    barrier()
    return counters


def interface_counters(text: str) -> dict[str, int]:
    """Bytes sent by each interface, from the text of /proc/net/dev."""
    rows = [line.split(":") for line in text.splitlines() if ":" in line]
    return {name.strip(): int(numbers.split()[8]) for name, numbers in rows}


def busiest(sent: Mapping[str, Sequence[int]]) -> tuple[str | None, float]:
    """The interface that sent most in the median of the blocks, and how much; None without any."""
    medians = {name: statistics.median(blocks) for name, blocks in sent.items()}
    return max(medians.items(), key=lambda item: item[1], default=(None, 0.0))


def _devices_of_this_machine() -> int:
    """Devices of all processes that share this process's interfaces."""
    namespace = Path("/proc/self/ns/net")  # Containers on one machine have their own interfaces.
    network = f"{socket.gethostname()} {namespace.readlink() if namespace.is_symlink() else ''}"
    mine = np.array([zlib.crc32(network.encode()), jax.local_device_count()], np.uint32)
    networks, devices = multihost_utils.process_allgather(mine).reshape(-1, 2).T
    return int(devices[networks == mine[0]].sum())
