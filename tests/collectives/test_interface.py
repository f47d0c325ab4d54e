"""The bytes of a majority vote, counted by the network interface under real processes.

`test_majority.py` reads what a vote sends out of the compiled program; here the kernel counts what
left, headers and acknowledgements included. With root, processes have an interface of their own;
without, they wait for a moment in which nobody else uses it. Run with -s to see the numbers.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes

COUNTERS = Path("/proc/net/dev")
LENGTH = 3 * 2**20  # Coordinates; divides into words and blocks for 3 and 4 devices.
NOISE = 0.006  # What others may send in the intervals around, as a share of what a vote sends.

# Bits per coordinate, the mean over devices; votes, then the way back.
FORMULAS = {
    3: {
        "ring": (1 + 2) / 3 + 2 / 3,
        "circulant": (1 + 1) / 3 + 2 / 3,
        # One device folds into the next one; two exchange halves that can hold counts of 2.
        "halving_doubling": (1 + 2 * 2 / 2) / 3 + (2 / 2 + 1) / 3,
        "direct": 2 / 3 + 2 / 3,
    },
    4: {
        "ring": (1 + 2 + 2) / 4 + 3 / 4,
        "circulant": 3 / 4 + 3 / 4,  # skips 3, 2, 1
        "halving_doubling": 1 / 2 + 2 / 4 + 3 / 4,
        "direct": 3 / 4 + 3 / 4,
        # Half to the neighbour; of the half owned, a half with counts of 2 to the far device.
        "hierarchical": 1 / 2 + 2 / 4 + 1 / 4 + 1 / 2,
    },
}

SCRIPT = """
import json, os, time
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec
import jaxcomm

REPEATS, WANTED, TRIES = 2, 2, 10
LENGTH, NOISE = int(os.environ["LENGTH"]), float(os.environ["NOISE"])
world, rank = jax.process_count(), jax.process_index()
shape = (2, world // 2) if world % 2 == 0 else (1, world)
grid = jax.sharding.Mesh(np.reshape(jax.devices(), shape), ("far", "near"))
PLACES = {
    "ring": ("data", jaxcomm.algorithms.ring()),
    "circulant": ("data", jaxcomm.algorithms.circulant()),
    "halving_doubling": ("data", jaxcomm.algorithms.halving_doubling()),
    "direct": ("data", jaxcomm.algorithms.direct()),
    "hierarchical": (("far", "near"), jaxcomm.algorithms.hierarchical(
        near=jaxcomm.algorithms.ring(), far=jaxcomm.algorithms.direct()
    )),
}


def values(device):
    bits = np.random.default_rng(device).integers(0, 2, LENGTH, np.int8)
    return (2 * bits - 1).astype(np.float32)


def compiled(axis, algorithm):
    tx = jaxcomm.majority_vote(axis, algorithm)

    def vote(x):
        x = x.reshape(2, -1)
        return tx.update(jaxcomm.mark_local(x), tx.init(x))[0]

    mesh = jaxcomm.data_mesh() if axis == "data" else grid
    with jax.set_mesh(mesh):
        spec = PartitionSpec(axis)
        x = jaxcomm.global_batch(values(rank)[None], axis)
        f = jax.shard_map(vote, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
        return jax.jit(f).lower(x).compile(), x


def counter():
    '''Bytes that the loopback interface has sent, while no process here sends any.'''
    multihost_utils.sync_global_devices("before")
    rows = [line.split(":") for line in open("/proc/net/dev") if ":" in line]
    (sent,) = [int(row.split()[8]) for interface, row in rows if interface.strip() == "lo"]
    multihost_utils.sync_global_devices("after")
    return sent


def counted(action):
    '''What was sent meanwhile, as process 0 has seen it.'''
    start = counter()
    action()
    return int(multihost_utils.broadcast_one_to_all(np.int32(counter() - start)))


def measure(program, x, times):
    '''Rounds of bytes (before, during, after), until enough of them had quiet neighbours.'''
    def run():
        for _ in range(REPEATS * times):
            jax.block_until_ready(program(x))

    run()
    started = time.monotonic()
    run()
    seconds = float(multihost_utils.broadcast_one_to_all(np.float32(time.monotonic() - started)))
    rounds, quiet = [], 0
    while quiet < WANTED and len(rounds) < TRIES:
        actions = (lambda: time.sleep(seconds)), run, (lambda: time.sleep(seconds))
        before, during, after = (counted(action) for action in actions)
        rounds.append((before, during, after))
        quiet += max(before, after) <= NOISE * during
    sent = float(jaxcomm.wire_report(program).bytes_mean) * times
    return dict(rounds=rounds, seconds=seconds, repeats=REPEATS, program=sent)


total = sum(values(device) for device in range(world))
found = {}
for name in os.environ["NAMES"].split():
    axis, algorithm = PLACES[name]
    program, x = compiled(axis, algorithm)
    result = np.asarray(program(x).addressable_shards[0].data).reshape(-1)
    np.testing.assert_array_equal(result[total != 0], np.sign(total[total != 0]))
    found[name] = measure(program, x, times=1)
    if name == "direct":
        found["direct twice"] = measure(program, x, times=2)
print(json.dumps(found))
"""


def bits_on_the_interface(measured: dict[str, Any], world: int) -> float:
    """Bits per coordinate and device; others can only add to them, so the least of the rounds."""
    rounds = measured["rounds"]
    quiet = [sent for before, sent, after in rounds if max(before, after) <= NOISE * sent]
    if not quiet:
        pytest.skip(
            f"others used the loopback interface in every round (before, vote, after): {rounds}"
        )
    return min(quiet) / measured["repeats"] / world * 8 / LENGTH


@pytest.fixture
def own_interface() -> Iterator[list[str]]:
    """A command that runs another in a new network namespace; none where there can be none."""
    name = f"jaxcomm-test-interface-{os.getpid()}"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        yield []
        return
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.multiprocess
@pytest.mark.skipif(not COUNTERS.exists(), reason=f"no {COUNTERS}: nothing counts the bytes")
@pytest.mark.parametrize(
    ("world", "names"),
    [
        (3, ["ring", "halving_doubling", "direct"]),
        pytest.param(4, ["circulant", "hierarchical"], marks=pytest.mark.slow),
        pytest.param(3, ["circulant"], marks=pytest.mark.slow),
        pytest.param(4, ["ring", "halving_doubling", "direct"], marks=pytest.mark.slow),
    ],
)
def test_the_interface_sends_the_bits_of_the_formulas(
    own_interface: list[str], world: int, names: list[str]
) -> None:
    formulas = {name: FORMULAS[world][name] for name in names}
    if "direct" in names:
        formulas["direct twice"] = 2 * formulas["direct"]
    env = {"LENGTH": str(LENGTH), "NOISE": str(NOISE), "NAMES": " ".join(names)}
    finished = run_processes(world, SCRIPT, timeout=240, env=env, prefix=own_interface)
    found = json.loads(finished[0].stdout.splitlines()[-1])
    print(f"\n{world} processes, bits per coordinate and device")
    print("                    formula   program  interface   ratio  others  rounds  seconds")
    ratios = {}
    for name, formula in formulas.items():
        measured = found[name]
        program = measured["program"] * 8 / LENGTH
        interface = bits_on_the_interface(measured, world)
        others = max(max(before, after) / sent for before, sent, after in measured["rounds"])
        ratios[name] = interface / formula
        print(
            f"{name:<18}{formula:9.4f}{program:10.4f}{interface:11.4f}{ratios[name]:8.4f}"
            f"{others:8.2%}{len(measured['rounds']):8}{measured['seconds']:9.2f}"
        )
    assert ratios == pytest.approx(dict.fromkeys(formulas, 1.0), rel=0.02)
