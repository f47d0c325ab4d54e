"""What is gathered of split parameters, exchanged, kept and sent, against numpy.

The loss is linear: each device's gradient is what its row of the batch says.
"""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxcomm
import oracles
from codec_oracles import HALF, blockwise, cnat_window, fp8, scaled_sign
from jaxcomm import algorithms, codecs
from processes import COMPILED_ANEW, run_processes

P = PartitionSpec
Tree = dict[str, Any]
WORLD, STEPS = 4, 3
# The dimension of each that is split, None for what is whole; joined, they are 10 + 6 * 7 + 12 * 5
# values of a device in one bucket.
SHAPES = {"bias": (5,), "head": (8, 5), "kernel": (6, 28), "stack": (3, 20, 4)}
DIMS = {"bias": None, "head": 0, "kernel": 1, "stack": 1}
SPLIT = [name for name, dim in DIMS.items() if dim is not None]


def rows_of(x: np.ndarray, dim: int, world: int = WORLD) -> np.ndarray:
    """(N, n/N): row r is what device r owns of a leaf."""
    return np.stack([part.reshape(-1) for part in np.split(x, world, axis=dim)])


def joined(rows: np.ndarray, name: str) -> np.ndarray:
    """The leaf whose rows these are."""
    dim = DIMS[name]
    assert dim is not None
    shape = list(SHAPES[name])
    shape[dim] //= len(rows)
    return np.concatenate([row.reshape(shape) for row in rows], axis=dim)


def bucket_of(tree: dict[str, np.ndarray]) -> np.ndarray:
    """All that is split, (N, n)."""
    return np.concatenate([rows_of(tree[name], DIMS[name]) for name in SPLIT], axis=1)


def leaves_of(bucket: np.ndarray) -> dict[str, np.ndarray]:
    """The reverse of `bucket_of`."""
    ends = np.cumsum([np.prod(SHAPES[name]) // WORLD for name in SPLIT])
    parts = np.split(bucket, ends[:-1], axis=1)
    return {name: joined(part, name) for name, part in zip(SPLIT, parts, strict=True)}


def reduce_scatter(
    x: np.ndarray, rounding: oracles.Rounding, owed: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Row r of all N devices' (N, n) for device r: decoded, added in order, divided by N.

    With errors `owed` (N, N, n), a device's own row needs no message and leaves none.
    """
    if owed is not None:
        x = x + owed
    sent = rounding(x)
    if owed is not None:
        mine = np.arange(len(x))
        sent[mine, mine] = x[mine, mine]
    total = functools.reduce(np.add, list(sent))
    return total * np.float32(1 / len(x)), x - sent


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def initial() -> dict[str, np.ndarray]:
    return {name: normal(shape, i) for i, (name, shape) in enumerate(SHAPES.items())}


def gradients(seed: int) -> dict[str, np.ndarray]:
    """Another gradient for every device: a leading device axis."""
    return {
        name: normal((WORLD, *shape), 100 * seed + i)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def linear(params: Tree, grads: Tree) -> tuple[jax.Array, Tree]:
    """A loss with these gradients; and the gathered parameters."""
    whole = jaxcomm.gather(params)
    return sum(jnp.sum(whole[name] * grads[name][0]) for name in whole), whole


def step_of(tx: Any, axis: Any = "data", microbatches: int = 1) -> Any:
    """(params, state, batch) to (what is gathered, updates, state)."""
    differentiate = jaxcomm.value_and_grad(linear, axis, has_aux=True)
    differentiate = jaxcomm.accumulate(differentiate, microbatches)

    def step(params: Tree, state: Any, batch: Tree) -> Any:
        at = jaxcomm.sharded_params(params, state)
        (_, whole), grads = differentiate(at, batch)
        updates, state = tx.update(grads, state, params)
        return whole, updates, state

    return step


class Program:
    """A step in either view, compiled once for all tests that look at it."""

    def __init__(self, tx: Any, manual: bool = False, mesh: Any = None, exempt: Any = ()) -> None:
        self.mesh = mesh or jaxcomm.data_mesh(devices=jax.devices()[:WORLD])
        axis = self.axis = self.mesh.axis_names if len(self.mesh.axis_names) > 1 else "data"
        with jax.set_mesh(self.mesh):
            self.params = jaxcomm.shard(initial(), axis, exempt=exempt)
            self.start = tx.init(self.params)
            step = step_of(tx, axis)
            if manual:
                specs = jax.tree.map(lambda x: x.sharding.spec, self.params)
                state = jaxcomm.state_spec(tx, self.params, self.mesh)
                step = jax.shard_map(
                    step, in_specs=(specs, state, P(axis)), out_specs=(P(), specs, state)
                )
            self.step = jax.jit(step)

    def run(self, *batches: Tree) -> list[Any]:
        """What is gathered, the updates and the states of several steps."""
        state, steps = self.start, []
        with jax.set_mesh(self.mesh):
            for grads in batches:
                batch = jaxcomm.global_batch(grads, self.axis)
                whole, updates, state = self.step(self.params, state, batch)
                steps.append((whole, updates, state))
        assert self.step._cache_size() == 1
        specs = jax.tree.map(lambda x: x.sharding.spec, self.params)
        assert jax.tree.map(lambda x: x.sharding.spec, updates) == specs
        types = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), (self.start, state))
        assert types[0] == types[1]
        return steps

    def report(self) -> jaxcomm.WireReport:
        with jax.set_mesh(self.mesh):
            batch = jaxcomm.global_batch(gradients(0), self.axis)
            return jaxcomm.wire_report(self.step.lower(self.params, self.start, batch).compile())


# name: what gradients travel in, how that rounds, whether errors are fed back; and shards.
CASES: dict[str, tuple[Any, oracles.Rounding, bool, Any, oracles.Rounding]] = {
    "float32": ("float32", oracles.round_float32, False, "float32", oracles.round_float32),
    "bfloat16": ("bfloat16", oracles.round_bfloat16, False, "bfloat16", oracles.round_bfloat16),
    "int8": (
        codecs.int8(32),
        lambda x: blockwise(x, HALF, 32, 127, "max"),
        False,
        codecs.int8(16),
        lambda x: blockwise(x, HALF, 16, 127, "max"),
    ),
    "int4, errors fed back": (
        codecs.int4(32),
        lambda x: blockwise(x, HALF, 32, 7, "max"),
        True,
        "bfloat16",
        oracles.round_bfloat16,
    ),
    "cnat": (
        codecs.cnat(rounding="nearest"),
        lambda x: cnat_window(x, HALF),
        False,
        codecs.fp8_e4m3(32),
        lambda x: fp8(x, 32, 4, 448),
    ),
    "fp8, errors fed back": (
        codecs.fp8_e4m3(32),
        lambda x: fp8(x, 32, 4, 448),
        True,
        "float32",
        oracles.round_float32,
    ),
    "scaled_sign, errors fed back": (
        codecs.scaled_sign(32),
        lambda x: scaled_sign(x, 32),
        True,
        "bfloat16",
        oracles.round_bfloat16,
    ),
}
VIEWS = {name: i % 2 == 1 for i, name in enumerate(CASES)}  # whether the manual view


@functools.cache
def case_program(name: str) -> Program:
    codec, _, feedback, gather, _ = CASES[name]
    tx = jaxcomm.sharded(jaxcomm.mean("data", codec, error_feedback=feedback), gather)
    return Program(tx, manual=VIEWS[name])


@pytest.mark.newest
@pytest.mark.parametrize("name", CASES)
def test_what_is_gathered_exchanged_and_kept(name: str) -> None:
    _, rounding, feedback, _, rounds_shards = CASES[name]
    by_row = lambda f: lambda x: np.apply_along_axis(f, -1, x)  # noqa: E731
    batches = [gradients(seed) for seed in range(STEPS)]
    owed = np.zeros((WORLD, WORLD, bucket_of(initial()).shape[1]), np.float32) if feedback else None
    expected = leaves_of(by_row(rounds_shards)(bucket_of(initial())))
    for grads, (whole, updates, state) in zip(
        batches, case_program(name).run(*batches), strict=True
    ):
        sent = np.stack([bucket_of({n: g[r] for n, g in grads.items()}) for r in range(WORLD)])
        rows, errors = reduce_scatter(sent, by_row(rounding), owed)
        exact = dict(rtol=1e-6, atol=1e-7) if "sign" in name else dict(rtol=0, atol=0)
        for leaf, value in leaves_of(rows).items():
            np.testing.assert_allclose(updates[leaf], value, **exact)
            np.testing.assert_array_equal(whole[leaf], expected[leaf])
        np.testing.assert_allclose(updates["bias"], grads["bias"].mean(0), rtol=1e-6, atol=1e-7)
        if feedback:
            owed = errors
            residual = {n: np.asarray(x) for n, x in zip(SPLIT, state.residual.values, strict=True)}
            kept = np.stack([bucket_of({n: x[r] for n, x in residual.items()}) for r in range(4)])
            np.testing.assert_allclose(kept, errors, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int4, errors fed back"])
def test_bytes_are_those_of_the_docstring(name: str) -> None:
    codec, _, _, gather, _ = CASES[name]
    n, whole = bucket_of(initial()).shape[1], SHAPES["bias"][0]
    report = case_program(name).report()
    others = WORLD - 1
    assert report.only("all-gather").bytes_max == others * codecs.from_name(gather).message_bytes(n)
    kind = "reduce-scatter" if name == "float32" else "all-to-all"
    sent = report.only(kind).bytes_max
    assert sent == others * codecs.from_name(codec).message_bytes(n)
    # What is whole, a flag; and inside shard_map the loss with what was gathered.
    gathered = sum(int(np.prod(shape)) for shape in SHAPES.values())
    values = whole + 1 + (1 + gathered if VIEWS[name] else 0)
    assert report.only("all-reduce").bytes_max == 2 * others * values * 4 / WORLD
    assert {c.op for c in report.collectives} == {"all-gather", kind, "all-reduce"}


def test_majorities_of_signs() -> None:
    votes = jaxcomm.majority_vote("data", ties="positive", zeros="abstain", exempt=["head"])
    program = Program(jaxcomm.sharded(votes, "bfloat16"), exempt=["head"])
    grads = {name: np.round(g) for name, g in gradients(0).items()}
    ((_, updates, _),) = program.run(grads)
    for name in ("kernel", "stack"):
        votes = np.sign(grads[name]).sum(0)
        tied = (votes == 0) & (grads[name] != 0).any(0)
        np.testing.assert_array_equal(updates[name], np.where(tied, 1, np.sign(votes)))
    for name in ("bias", "head"):  # exempt
        np.testing.assert_array_equal(updates[name], np.sign(grads[name].mean(0)))


def test_what_is_split_and_exempt_travels_in_float32() -> None:
    """`shard` keeps what is exempt whole, but others may have split it."""
    tx = jaxcomm.sharded(jaxcomm.mean("data", "int4", exempt=["kernel"]), "int4")
    program = Program(tx)
    ((whole, updates, _),) = program.run(gradients(0))
    np.testing.assert_array_equal(whole["kernel"], initial()["kernel"])
    expected = gradients(0)["kernel"].mean(0)
    np.testing.assert_allclose(updates["kernel"], expected, rtol=1e-6, atol=1e-6)
    assert np.abs(np.asarray(updates["stack"]) - gradients(0)["stack"].mean(0)).max() > 1e-3


BAD = 1  # the step with a value that is not finite, on one device


@pytest.mark.parametrize(("name", "value"), [("int4, errors fed back", np.nan), ("votes", np.inf)])
def test_a_bad_value_on_one_device_is_seen_in_all_shards(name: str, value: float) -> None:
    good, bad = [gradients(seed) for seed in range(2)], gradients(7)
    bad["stack"][2, 1, 0, 0] = value
    program = Program(jaxcomm.sharded(jaxcomm.majority_vote("data"))) if name == "votes" else None
    program = program or case_program(name)
    (_, _, before), (_, nothing, after), (_, then, _) = program.run(good[0], bad, good[1])
    for leaf in nothing.values():
        assert all(np.isnan(shard.data).all() for shard in leaf.addressable_shards)
    jax.tree.map(np.testing.assert_array_equal, after.residual, before.residual)
    assert all(np.isfinite(leaf).all() for leaf in then.values())
    assert after.step == before.step + 1


HOSTS = (2, 2)


@pytest.mark.parametrize("manual", [False, True])
def test_two_levels(manual: bool) -> None:
    """Near in float32, far in int8 with errors fed back; rows go to every host once."""
    mesh = jax.make_mesh(
        HOSTS, ("hosts", "devices"), (AxisType.Auto,) * 2, devices=jax.devices()[:WORLD]
    )
    codec = codecs.int8(32)
    direct = algorithms.direct()
    algorithm = algorithms.hierarchical(near=direct, far=direct, near_codec="float32")
    exchange = jaxcomm.mean(("hosts", "devices"), codec, algorithm, error_feedback=True)
    program = Program(jaxcomm.sharded(exchange, codec), manual, mesh)
    grads = gradients(0)
    ((whole, updates, state),) = program.run(grads)
    by_row = lambda x: np.apply_along_axis(lambda y: blockwise(y, HALF, 32, 127, "max"), -1, x)  # noqa: E731
    for name, value in leaves_of(by_row(bucket_of(initial()))).items():
        np.testing.assert_array_equal(whole[name], value)
    sent = np.stack([bucket_of({n: g[r] for n, g in grads.items()}) for r in range(WORLD)])
    hosts = sent.reshape(2, 2, WORLD, -1).sum(1)  # of both devices of a host
    owner = np.arange(WORLD) // 2  # the host of the device that owns a row
    coded = np.stack([np.where((owner == h)[:, None], x, by_row(x)) for h, x in enumerate(hosts)])
    rows = coded.sum(0) / np.float32(WORLD)
    for name, value in leaves_of(rows).items():
        np.testing.assert_allclose(updates[name], value, rtol=1e-6, atol=1e-6)
    left = {n: np.asarray(x).sum(0) for n, x in zip(SPLIT, state.residual.values, strict=True)}
    for name, total in left.items():
        missing = grads[name].sum(0) - WORLD * np.asarray(updates[name])
        np.testing.assert_allclose(total, missing, atol=1e-5)
    n = sent.shape[-1]
    parts = program.report().by_axes(mesh)
    far, near = parts["hosts",], parts["devices",]
    assert far.only("all-gather").bytes_max == far.only("all-to-all").bytes_max
    assert far.only("all-gather").bytes_max == codec.message_bytes(n)
    assert near.only("all-gather").bytes_max == 2 * codec.message_bytes(n)
    assert near.only("all-to-all").bytes_max == 2 * 4 * n
    assert {c.op for c in parts["hosts", "devices"].collectives} == {"all-reduce"}


@pytest.mark.parametrize("codec", ["int4", "cnat"])
def test_microbatches_are_exchanged_one_by_one(codec: str) -> None:
    """Residuals go from one to the next, and each rounds with a key of its own."""
    tx = jaxcomm.sharded(jaxcomm.mean("data", codec, error_feedback=codec == "int4"))
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD])):
        params = jaxcomm.shard(initial(), "data")
        state, step = tx.init(params), jax.jit(step_of(tx, microbatches=2))
        pair = {n: np.stack(p, 1) for n, p in zipped(gradients(0), gradients(1)).items()}
        if codec == "cnat":  # between two powers of two, on one device
            pair = {n: np.zeros_like(x) for n, x in pair.items()}
            pair["stack"][2] = 1.5
        batch = {n: x.reshape(2 * WORLD, *x.shape[2:]) for n, x in pair.items()}
        _, updates, state = step(params, state, jaxcomm.global_batch(batch, "data"))
    if codec == "cnat":
        found, counts = np.unique(np.asarray(updates["stack"]) * WORLD, return_counts=True)
        np.testing.assert_array_equal(found, [1, 1.5, 2])
        assert 0.35 < counts[1] / counts.sum() < 0.65
        return
    for name, left in zip(SPLIT, state.residual.values, strict=True):
        missing = pair[name].mean(1).sum(0) - WORLD * np.asarray(updates[name])
        np.testing.assert_allclose(np.asarray(left).sum(0), missing, atol=1e-5)


def zipped(a: Tree, b: Tree) -> dict[str, Any]:
    return {name: (a[name], b[name]) for name in a}


IN_PROCESSES = """
import json, zlib
import jax, jax.numpy as jnp, numpy as np
import jaxcomm


def digests(mesh):
    \"\"\"Of what each device of this process holds after two steps, by its place.\"\"\"
    jax.set_mesh(mesh)
    x = np.random.default_rng(0).standard_normal((3, 96, 1024)).astype(np.float32)
    mine = [i for i, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()]
    batch = jaxcomm.global_batch(x[mine], "data")
    tx = jaxcomm.sharded(jaxcomm.mean("data", "int4", error_feedback=True), "int8")
    params = jaxcomm.shard({"w": x[0], "b": np.ones(3, np.float32)}, "data")
    state = tx.init(params)

    def loss_fn(params, x):
        whole = jaxcomm.gather(params)
        return jnp.sum(whole["w"] * x[0]) + jnp.sum(whole["w"][0]) * jnp.sum(whole["b"])

    @jax.jit
    def step(params, state, x):
        at = jaxcomm.sharded_params(params, state)
        _, grads = jaxcomm.value_and_grad(loss_fn, "data")(at, x)
        return tx.update(grads, state)

    found = {}
    for _ in range(2):
        updates, state = step(params, state, batch)
        for name, shards in (("w", updates["w"]), ("residual", state.residual.values[0])):
            for shard in shards.addressable_shards:
                place = list(mesh.devices.flat).index(shard.device)
                bits = np.ascontiguousarray(shard.data).tobytes()
                found[f"{name} {place}"] = zlib.crc32(bits, found.get(f"{name} {place}", 0))
    return found
"""


@pytest.mark.multiprocess
def test_processes_have_the_bits_of_simulated_devices() -> None:
    """Over TCP, where large messages travel in rounds of their own."""
    script = IN_PROCESSES + "\nprint(json.dumps(digests(jaxcomm.data_mesh())))"
    finished = run_processes(3, script, env=COMPILED_ANEW, timeout=240)
    reports = [json.loads(process.stdout.splitlines()[-1]) for process in finished]
    names: dict[str, Any] = {}
    exec(IN_PROCESSES, names)
    expected = names["digests"](jaxcomm.data_mesh(devices=jax.devices()[:3]))
    assert functools.reduce(dict.__or__, reports) == expected
    assert len(expected) == 6
