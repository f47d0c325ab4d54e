"""Sparse means and 1-bit Adam between hosts of several devices: a host sends one vector."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
from jaxcomm import sparse
from jaxcomm.collectives.one_bit import BLOCK, chunk_length, one_bit_mean
from processes import COMPILED_ANEW, flags_of, run_processes

N, DENSITY = 6000, 0.02
LAYOUTS = {4: (0, 0, 1, 1, 2, 2, 3, 3), 2: (0, 0, 0, 0, 1, 1, 1, 1)}

each_layout = pytest.mark.parametrize("hosts", LAYOUTS)
each_algorithm = pytest.mark.parametrize("name", sparse.BY_NAME)


def steps_of(tx: Any, mesh: Mesh, rows: np.ndarray) -> tuple[np.ndarray, Any]:
    """The updates of [T, N, n] gradients, and the last state."""
    placed = jax.NamedSharding(mesh, PartitionSpec("data"))
    updates = []
    with jax.set_mesh(mesh):
        state = tx.init({"w": jnp.zeros((1, rows.shape[-1]))})
        update = jax.jit(tx.update)
        for row in rows:
            grads = {"w": jax.device_put(row[:, None], placed)}
            update_of, state = update(grads, state, {"w": jnp.zeros((1, rows.shape[-1]))})
            copies = [np.asarray(s.data) for s in update_of["w"].addressable_shards]
            assert all(copy.tobytes() == copies[0].tobytes() for copy in copies)
            updates.append(copies[0].reshape(-1))
    return np.stack(updates), state


def gradients(steps: int, world: int = 8, n: int = N) -> np.ndarray:
    rng = np.random.default_rng(n)
    rows = rng.standard_normal((steps, world, n)) * np.exp(rng.standard_normal(n))
    return rows.astype(np.float32)


def parts_of(devices: int) -> tuple[np.ndarray, int]:
    """The part of a host to which each of N values belongs, and the length of a part."""
    block = N // (16 * devices)  # short blocks, as the vector is short
    return np.arange(N) // block % devices, -(-N // (block * devices)) * block


@each_layout
@each_algorithm
def test_nothing_is_lost_and_a_host_keeps_one_residual(
    name: str, hosts: int, mesh8: Mesh, hosts_of: Callable[..., None]
) -> None:
    hosts_of(*LAYOUTS[hosts])
    rows = gradients(3)
    updates, state = steps_of(jaxcomm.sparse_mean("data", DENSITY, name), mesh8, rows)
    residual = np.asarray(state.residual.values[0]).reshape(8, N)
    owed = residual.astype(np.float64).sum(0)
    total = 8 * updates.astype(np.float64).sum(0) + owed
    np.testing.assert_allclose(total, rows.astype(np.float64).sum((0, 1)), atol=2e-4)
    # The part of a device at place d on its host: every D-th block, from the d-th.
    per_host = 8 // hosts
    part_of, m = parts_of(per_host)
    for device, kept in enumerate(residual):
        assert set(part_of[np.flatnonzero(kept)]) == {device % per_host}
    k = per_host * dataclasses.replace(sparse.from_name(name), density=DENSITY).k(m)
    assert state.report.k == k
    assert 0.5 * k <= state.report.delivered <= 2 * k
    assert 0.5 * k <= np.count_nonzero(updates[-1]) <= hosts * 2 * k
    assert float(state.report.applied) == np.count_nonzero(updates[-1])


@pytest.mark.parametrize("momentum", [None, 0.5])
@each_algorithm
def test_it_is_the_exchange_of_the_sums_of_hosts(
    name: str, momentum: float | None, mesh8: Mesh, hosts_of: Callable[..., None]
) -> None:
    """Bit for bit, part by part, over as many steps as thresholds are reused."""
    rows = np.round(100 * gradients(4))  # sums of them are exact, in any order
    sums = rows[:, 0::2] + rows[:, 1::2]
    mesh4 = jaxcomm.data_mesh(devices=jax.devices()[:4])
    tx = jaxcomm.sparse_mean("data", DENSITY, name, momentum_correction=momentum)
    part_of, m = parts_of(2)
    expected = np.zeros((len(rows), N), np.float32)
    for part in 0, 1:
        own = sums[..., part_of == part]
        own = np.pad(own, [(0, 0), (0, 0), (0, m - own.shape[-1])])
        expected[:, part_of == part] = steps_of(tx, mesh4, own)[0][:, : (part_of == part).sum()]
    hosts_of(*LAYOUTS[4])
    found, _ = steps_of(tx, mesh8, rows)
    np.testing.assert_array_equal(found, expected / 2)


@pytest.mark.parametrize(("n", "density"), [(3, 0.5), (990, 1.0)])
def test_no_more_than_all_values(
    n: int, density: float, mesh8: Mesh, hosts_of: Callable[..., None]
) -> None:
    """Where parts are padded, also for the distance to the true top-k."""
    hosts_of(*LAYOUTS[2])
    tx = jaxcomm.sparse_mean("data", density, measure_xi=True)
    _, state = steps_of(tx, mesh8, gradients(1, n=n))
    assert state.report.k == n


def test_large_values_side_by_side_are_selected(mesh8: Mesh, hosts_of: Callable[..., None]) -> None:
    """All parts have as many of them, though they are in a hundredth of the vector."""
    hosts_of(*LAYOUTS[2])
    n = 2**17
    rows = gradients(1, n=n)
    large = slice(n // 2, n // 2 + n // 64)
    rows[..., large] += 1000
    updates, _ = steps_of(jaxcomm.sparse_mean("data", 1 / 64, "topk_allgather"), mesh8, rows)
    assert np.count_nonzero(updates[0, large]) >= 0.95 * n // 64


@each_algorithm
def test_bytes_of_a_host(name: str, mesh8: Mesh, hosts_of: Callable[..., None]) -> None:
    """Those of one device in a world of hosts, give or take the parts that are not quite equal."""
    tx = jaxcomm.sparse_mean("data", 0.05, name)
    n, spec = 2**18, PartitionSpec("data")

    def sent(mesh: Mesh, world: int, hosts: tuple[int, ...]) -> int:
        with jax.set_mesh(mesh):
            params = {"w": jax.ShapeDtypeStruct((1, n), jnp.float32)}
            state = jax.eval_shape(tx.init, params)
            grads = jax.ShapeDtypeStruct(
                (world, 1, n), jnp.float32, sharding=jax.NamedSharding(mesh, spec)
            )
            compiled = jax.jit(tx.update).lower({"w": grads}, state).compile()
        return jaxcomm.wire_report(compiled).bytes_between(hosts)

    one_each = sent(jaxcomm.data_mesh(devices=jax.devices()[:4]), 4, (0, 1, 2, 3))
    flat = sent(mesh8, 8, LAYOUTS[4])
    hosts_of(*LAYOUTS[4])
    by_hosts = sent(mesh8, 8, LAYOUTS[4])
    assert by_hosts == pytest.approx(one_each, rel=0.01)
    assert flat > 1.4 * by_hosts


def one_bit_steps(
    mesh: Mesh, rows: np.ndarray, padding: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of [T, N, n]: the means, and the last errors of workers and of servers."""
    world, n = rows.shape[1:]
    counts = np.full(n // BLOCK, BLOCK)
    counts[-1] -= padding

    def run(x: jax.Array) -> Any:
        def step(errors: Any, x: jax.Array) -> Any:
            mean, *errors = one_bit_mean(x, *errors, counts, "data")
            return errors, mean

        none = [jnp.zeros(n), jnp.zeros(chunk_length(n, world))]
        errors, means = jax.lax.scan(step, none, x[:, 0])
        return means[:, None], *(error[None] for error in errors)

    spec, of_steps = PartitionSpec("data"), PartitionSpec(None, "data")
    run = jax.shard_map(
        run, mesh=mesh, in_specs=of_steps, out_specs=(of_steps, spec, spec), check_vma=False
    )
    means, worker, server = map(np.asarray, jax.jit(run)(rows))
    assert (means.view(np.uint32) == means[:, :1].view(np.uint32)).all()
    return means[:, 0], worker, server


@each_layout
def test_one_bit_owes_what_is_not_sent(
    hosts: int, mesh8: Mesh, hosts_of: Callable[..., None]
) -> None:
    hosts_of(*LAYOUTS[hosts])
    rows, n = gradients(20, n=12 * BLOCK), 12 * BLOCK - 900
    rows[..., n:] = 0  # padding; two of the eight chunks of two blocks are empty
    means, worker, server = one_bit_steps(mesh8, rows, padding=900)
    owed = worker.mean(0, np.float64) + server.reshape(-1)[: rows.shape[-1]]
    np.testing.assert_allclose(
        (means.sum(0, np.float64) + owed)[:n],
        rows.mean(1, np.float64).sum(0)[:n],
        atol=2e-5 * np.abs(rows).max(),
    )
    assert not owed[n:].any()
    is_kept = (worker.reshape(8, 12, BLOCK) != 0).any(2)
    of_chunk = np.arange(12) // 2  # the chunk of a block, and so the device that owns it
    for device in range(8):
        assert (is_kept[device] == (of_chunk % (8 // hosts) == device % (8 // hosts))).all()


def test_one_bit_is_the_exchange_of_the_sums_of_hosts(
    mesh8: Mesh, hosts_of: Callable[..., None]
) -> None:
    rows = np.round(100 * gradients(1, n=16 * BLOCK))
    sums = (rows[:, 0::2] + rows[:, 1::2]).reshape(1, 4, 8, -1)
    mesh4 = jaxcomm.data_mesh(devices=jax.devices()[:4])
    parts = [one_bit_steps(mesh4, sums[:, :, d::2].reshape(1, 4, -1)) for d in (0, 1)]
    means = np.stack([part[0].reshape(4, -1) for part in parts], axis=1).reshape(-1)
    hosts_of(*LAYOUTS[4])
    found = one_bit_steps(mesh8, rows)
    np.testing.assert_array_equal(found[0][0], means / 2)
    servers = np.stack([part[2] for part in parts], axis=1).reshape(8, -1)
    np.testing.assert_array_equal(found[2], servers / 2)


def test_one_bit_adam_sends_a_vector_of_each_host(
    mesh8: Mesh, hosts_of: Callable[..., None]
) -> None:
    def sent() -> int:
        tx = jaxcomm.one_bit_adam("data", 1e-3, dense_steps=2)
        with jax.set_mesh(mesh8):
            params = {"w": jnp.zeros((1, 2**18))}
            sharding = jax.NamedSharding(mesh8, PartitionSpec("data"))
            grads = {"w": jax.ShapeDtypeStruct((8, 1, 2**18), jnp.float32, sharding=sharding)}
            update = jax.jit(lambda g, s, p: tx.update(g, s, p, dense=False))
            compiled = update.lower(grads, tx.init(params), params).compile()
        return jaxcomm.wire_report(compiled).bytes_between(LAYOUTS[2])

    flat = sent()
    hosts_of(*LAYOUTS[2])
    # In eighths of the bits, 16 to owners and a ring's 7 back; now 4 to owners and 4 back.
    assert flat / sent() == 23 / 8


def test_a_sum_of_a_host_that_overflows_is_seen(mesh8: Mesh, hosts_of: Callable[..., None]) -> None:
    hosts_of(*LAYOUTS[4])
    rows = gradients(2)
    rows[1, 2:4, ::3] = 3e38
    for tx in (
        *(jaxcomm.sparse_mean("data", DENSITY, name) for name in sparse.BY_NAME),
        jaxcomm.one_bit_adam("data", 1e-3, dense_steps=1),
    ):
        updates, state = steps_of(tx, mesh8, rows)
        assert np.isfinite(updates[0]).all() and np.isnan(updates[1]).all()
        kept = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert all(np.isfinite(x).all() for x in kept)


@pytest.mark.parametrize(
    "tx",
    [
        jaxcomm.sparse_mean("data", DENSITY, momentum_correction=0.5),
        jaxcomm.one_bit_adam("data", 1e-3, dense_steps=1),
    ],
    ids=["sparse_mean", "one_bit_adam"],
)
def test_a_state_of_hosts_goes_on_without_them(
    tx: Any, mesh8: Mesh, hosts_of: Callable[..., None]
) -> None:
    """What is owed stays owed, on fewer devices and where each is a host."""
    hosts_of(*LAYOUTS[4])
    _, state = steps_of(tx, mesh8, gradients(4))
    saved = jax.tree.map(np.asarray, jax.device_get(state))

    def owed(state: Any) -> np.ndarray:
        if hasattr(state, "residual"):
            return np.asarray(state.residual.values[0]).mean(0, np.float64).reshape(-1)
        worker = np.asarray(state.worker_error.values[0]).mean(0, np.float64)
        return worker + np.asarray(state.server_error.values[0]).reshape(-1)[: worker.size]

    hosts_of(*range(8))
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        fewer = jaxcomm.resize_state(tx, saved, {"w": jnp.zeros((1, N))})
    np.testing.assert_allclose(owed(fewer), owed(saved), rtol=1e-5, atol=1e-6)
    assert np.abs(owed(saved)).max() > 0.1


@pytest.mark.parametrize("name", ["sparse_mean", "one_bit_adam"])
def test_devices_in_another_order_are_told(name: str, hosts_of: Callable[..., None]) -> None:
    hosts_of(*LAYOUTS[4])
    devices = [jax.devices()[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    options = {"sparse_mean": {}, "one_bit_adam": {"learning_rate": 0.1, "dense_steps": 1}}[name]
    with jax.set_mesh(jaxcomm.data_mesh(devices=devices)):
        with pytest.warns(UserWarning, match=r"of jax.devices\(\) in their order\.$"):
            getattr(jaxcomm, name)("data", **options).init({"w": jnp.zeros((16, 16))})


REAL = """
    import hashlib, jax.numpy as jnp, numpy as np
    import jaxcomm

    jax.set_mesh(jaxcomm.data_mesh())
    world, n = jax.device_count(), 2**17
    rows = np.random.default_rng(0).standard_normal((3, world, 128, n // 128), np.float32)
    params = jaxcomm.replicate({"w": np.zeros(rows.shape[2:], np.float32)})
    gathered = jax.experimental.multihost_utils.process_allgather
    for name in jaxcomm.sparse.BY_NAME:
        tx = jaxcomm.sparse_mean("data", 0.02, name)
        state, update, total = tx.init(params), jax.jit(tx.update), 0
        for row in rows:
            mine = row[2 * jax.process_index() :][:2]  # of this process's two devices
            updates, state = update({"w": jaxcomm.global_batch(mine, "data")}, state)
            total += world * np.asarray(updates["w"], np.float64)
        left = gathered(state.residual.values[0], tiled=True).astype(np.float64).sum(0)
        np.testing.assert_allclose(total + left, rows.astype(np.float64).sum((0, 1)), atol=1e-4)
        print(name, hashlib.sha256(np.asarray(updates["w"]).tobytes()).hexdigest())
    tx = jaxcomm.one_bit_adam("data", 1e-3, dense_steps=1)
    state, update = tx.init(params), jax.jit(tx.update)
    for row in rows:
        mine = row[2 * jax.process_index() :][:2]
        updates, state = update({"w": jaxcomm.global_batch(mine, "data")}, state, params)
    print(hashlib.sha256(np.asarray(updates["w"]).tobytes()).hexdigest())
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("hosts", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_of_two_devices(hosts: int) -> None:
    """Over TCP: nothing is lost, and all processes have the same bits."""
    env = COMPILED_ANEW | flags_of(devices=2)
    done = run_processes(hosts, REAL, env=env)
    assert len({run.stdout for run in done}) == 1
    assert len(done[0].stdout.splitlines()) == len(sparse.BY_NAME) + 1
