"""The same oracles, between real processes over TCP."""

import json
from pathlib import Path

import pytest

import oracles
from algorithm_table import NAMED
from processes import COMPILED_ANEW, OPTIMIZED, as_a_machine, run_processes

SCRIPT = """
import functools, json, os, sys
import numpy as np
sys.path.append(os.environ["TESTS"])
import jaxcomm, oracles
from algorithm_table import CASES, NAMED
from jaxcomm.collectives import _sending

_sending.LEAST_BYTES = _sending.LEAST_SWAPPED = 0  # as long messages are sent
rank, spec = jax.process_index(), jax.sharding.PartitionSpec("data")


def check(world):
    jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:world]))
    x = np.random.default_rng(0).standard_normal((world, 1000)).astype(np.float32)
    batch = jaxcomm.global_batch(x[rank : rank + 1], "data")
    checked = []
    for i, algorithm in enumerate(NAMED):
        codec = list(oracles.ROUNDING)[(i + world) % 3]
        mean = functools.partial(jaxcomm.pmean, axis_name="data", codec=codec, algorithm=algorithm)
        f = jax.jit(jax.shard_map(mean, in_specs=spec, out_specs=spec, check_vma=False))
        (mine,) = f(batch).addressable_shards
        expected = oracles.scaled(CASES[algorithm].oracle, x, codec)
        np.testing.assert_array_equal(np.asarray(mine.data)[0], expected)
        checked.append((codec, algorithm))
    return checked


def check_two_levels():
    # Two by two; whole numbers, so that sums are exact.
    axes = ("far", "near")
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 2)), axes)
    x = np.random.default_rng(0).integers(-8, 9, (4, 1000)).astype(np.float32)
    both = jax.sharding.PartitionSpec(axes)
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, both)
        batch = jax.make_array_from_process_local_data(sharding, x[rank : rank + 1])
        far = jaxcomm.algorithms.direct()
        for near in jaxcomm.algorithms.direct(), jaxcomm.algorithms.halving_doubling():
            algorithm = jaxcomm.algorithms.hierarchical(near=near, far=far)
            mean = functools.partial(jaxcomm.pmean, codec="float32", algorithm=algorithm)
            f = jax.shard_map(
                lambda v: mean(v, axes), in_specs=both, out_specs=both, check_vma=False
            )
            (mine,) = jax.jit(f)(batch).addressable_shards
            np.testing.assert_array_equal(np.asarray(mine.data)[0], x.mean(axis=0))


check_two_levels()
checked = {world: check(world) for world in (2, 3, 4) if rank < world}
print(json.dumps({"rank": rank, "pid": os.getpid(), "checked": checked}))
"""


@pytest.mark.multiprocess
@pytest.mark.newest
def test_every_process_has_the_oracle_bits() -> None:
    """Of two processes, then of three, then of all four."""
    tests = Path(__file__).parent.parent
    finished = run_processes(4, SCRIPT, env=OPTIMIZED | {"TESTS": str(tests)}, timeout=240)
    reports = [json.loads(process.stdout.splitlines()[-1]) for process in finished]
    assert [r["rank"] for r in reports] == list(range(4))
    assert len({r["pid"] for r in reports}) == 4
    assert [list(r["checked"]) for r in reports] == [
        ["2", "3", "4"],
        ["2", "3", "4"],
        ["3", "4"],
        ["4"],
    ]
    for checked in (checked for r in reports for checked in r["checked"].values()):
        codecs, algorithms = zip(*checked, strict=True)
        assert set(codecs) == set(oracles.ROUNDING) and set(algorithms) == set(NAMED)


MACHINES = """
import json, types
import jax, numpy as np
import jaxcomm
from jaxcomm import plan
from train import sync

devices = jax.devices()
try:
    jax.make_mesh((2, 2), ("a", "b"))
except ValueError as error:
    assert "multi-slice" in str(error)
office = plan.cluster(plan.fabrics.star("office", hosts=4, rate="1Gbit"))
found = plan(office, plan.workload(1e6, 80))
meshes = [
    jaxcomm.data_mesh(),
    jaxcomm.data_mesh(devices=devices[::-1]),
    found.mesh(),
    sync.make_mesh(types.SimpleNamespace(fsdp=2)),
]
both = jax.sharding.Mesh(np.reshape(devices, (2, 2)), ("far", "near"))
for mesh in (meshes[0], both):
    spec = jax.sharding.PartitionSpec(mesh.axis_names)
    mean = jax.shard_map(
        lambda x: jaxcomm.pmean(x, mesh.axis_names, "int8", "ring"),
        mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False,
    )
    rows = np.full((1, 8), jax.process_index(), np.float32)
    x = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, spec), rows)
    np.testing.assert_allclose(jax.jit(mean)(x).addressable_shards[0].data, 1.5, atol=0.02)
key = jax.random.key(2)  # of this process
jax.set_mesh(meshes[0])
local = jax.device_put(np.arange(4.0), jax.local_devices()[0])
values = {"w": np.full((2, 2), np.nan), "local": local, "empty": np.zeros((0, 3)), "scalar": 1.5}
room = np.ones(64 + 16, np.float32)
aligned = room[(start := -room.ctypes.data // 4 % 16) : start + 64]  # as XLA could use it
alone = jaxcomm.replicate(aligned)
aligned[:] = 7
np.testing.assert_array_equal(alone, np.ones(64))  # in a buffer of its own
placed = jaxcomm.replicate(values)
for name, value in values.items():
    assert placed[name].sharding.is_fully_replicated and placed[name].dtype == np.float32
    np.testing.assert_array_equal(placed[name], value)
keys = {"mine": key, "typed": jax.random.split(jax.random.key(3), 2)}  # the last spans processes
for name, placed in jaxcomm.replicate(keys).items():
    assert placed.dtype == keys[name].dtype and placed.sharding.is_fully_replicated
    np.testing.assert_array_equal(*map(jax.random.key_data, (placed, keys[name])))
rows = jaxcomm.shard({"w": np.arange(32.0).reshape(8, 4)}, "data")["w"].addressable_shards[0]
np.testing.assert_array_equal(np.asarray(rows.data)[0], 8.0 * jax.process_index() + np.arange(4))
try:
    jaxcomm.replicate({"w": np.ones(3), "b": np.full(2, jax.process_index() == 2)})
except ValueError as error:
    assert str(error).startswith("process 2 has other values of b than process 0"), error
else:
    raise AssertionError("unequal values were taken for equal ones")
typed = jax.random.normal(jax.random.key(jax.process_index() // 3), (4,))  # where a mesh is set
assert not typed.is_fully_addressable
try:
    jaxcomm.replicate({"w": np.ones(3), "typed": typed})
except ValueError as error:
    assert str(error).startswith("process 3 has other values of typed than process 0"), error
else:
    raise AssertionError("unequal values were taken for equal ones, by their type")
try:
    jaxcomm.replicate({"w": np.zeros((2, 3) if jax.process_index() == 1 else (3, 2))})
except ValueError as error:
    assert str(error).startswith("process 1 has other names, shapes or dtypes"), error
else:
    raise AssertionError("other shapes were taken for equal ones")
order = [[devices.index(d) for d in mesh.devices.flat] for mesh in meshes]
print(json.dumps([len({d.slice_index for d in devices}), order, list(meshes[3].devices.shape)]))
"""


@pytest.mark.multiprocess
def test_meshes_span_machines() -> None:
    if not as_a_machine():
        pytest.skip("nothing can be mounted over the boot id, so all is one machine")
    for finished in run_processes(4, MACHINES, env=OPTIMIZED):
        machines, (whole, backwards, planned, groups), shape = json.loads(finished.stdout)
        assert machines == 4 and shape == [2, 2]
        assert whole == planned == groups == [0, 1, 2, 3] and backwards == [3, 2, 1, 0]


FRONT_PAGE = """
import json
import jax, jax.numpy as jnp, numpy as np, optax
import jaxcomm

world, rank = jax.process_count(), jax.process_index()
jax.set_mesh(jaxcomm.data_mesh())
rng = np.random.default_rng(0)
x = rng.standard_normal((8, 5)).astype(np.float32)
y = rng.standard_normal((8, 3)).astype(np.float32)
params = jaxcomm.replicate({"w": np.ones((5, 3), np.float32), "b": np.zeros(3, np.float32)})
tx = jaxcomm.multi_steps(optax.chain(jaxcomm.mean("data", codec="bfloat16"), optax.adam(1e-2)), 2)
state = tx.init(params)

def loss_fn(params, batch):
    return jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2)

@jax.jit
def step(params, state, batch):
    loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

share = slice(rank * 8 // world, (rank + 1) * 8 // world)
batch = jaxcomm.global_batch((x[share], y[share]), "data")
try:
    jaxcomm.global_batch(batch, "data")
except ValueError as error:
    assert "is global already" in str(error), error
else:
    raise AssertionError("a global batch was taken for a local one")
gradient = jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))
gradient(params, jaxcomm.replicate((x, y)))
unplaced = {"numpy": (x[share], y[share]), "device_put": jax.device_put((x[share], y[share]))}
for name, local in unplaced.items():
    for labels in local[1], batch[1]:
        try:
            gradient(params, (local[0], labels))
        except ValueError as error:
            message = f"leaf 0 of the batch is an array of process {rank} alone, not of all 2"
            assert message in str(error), error
        else:
            raise AssertionError(f"{name}: a local batch was taken for the global one")
for _ in range(6):
    params, state, loss = step(params, state, batch)
local = jax.tree.map(lambda p: np.asarray(p.addressable_shards[0].data), params)
bits = local["w"].tobytes().hex()
print(json.dumps({"w": bits, "loss": float(loss), "cache": step._cache_size()}))
"""


@pytest.mark.multiprocess
@pytest.mark.newest
def test_the_front_page_on_two_processes() -> None:
    reports = [
        json.loads(p.stdout.splitlines()[-1])
        for p in run_processes(2, FRONT_PAGE, env=OPTIMIZED | COMPILED_ANEW, timeout=240)
    ]
    assert reports[0] == reports[1]
    assert reports[0]["cache"] == 1
