"""Hosts of several devices: which these are, and exchanges that go by hosts without being told."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxcomm
from algorithm_table import CASES, mean_on_all, mean_program
from jaxcomm import _hosts
from jaxcomm.collectives import algorithms
from jaxcomm.collectives.algorithms._default import usual
from processes import flags_of, run_processes

DIRECT = algorithms.direct()
HOSTS = (0, 0, 1, 1, 2, 2, 3, 3)


def found(names: tuple[str, ...], shape: tuple[int, ...], axis: Any) -> int:
    mesh = jax.make_mesh(shape, names, (AxisType.Auto,) * len(names))
    with jax.set_mesh(mesh):
        return _hosts.devices_per_host(axis)


def test_devices_of_a_host_in_a_row(hosts_of: Any) -> None:
    assert found(("data",), (8,), "data") == 8  # one process
    hosts_of(0, 0, 1, 1, 2, 2, 3, 3)
    assert found(("data",), (8,), "data") == 2
    assert found(("data", "model"), (4, 2), "data") == 1  # a host's devices are apart
    assert found(("data", "model"), (4, 2), "model") == 2
    assert found(("model", "data"), (2, 4), "data") == 2
    assert found(("far", "near"), (2, 4), ("far", "near")) == 2
    assert found(("far", "near"), (2, 4), ("near", "far")) == 1
    hosts_of(0, 0, 0, 0, 1, 1, 1, 1)
    assert found(("data", "model"), (4, 2), "data") == 2
    for uneven in (0, 0, 0, 1, 1, 1, 2, 2), (0, 0, 1, 1, 0, 0, 1, 1), (0, 1, 1, 2, 2, 3, 3, 4):
        hosts_of(*uneven)
        assert found(("data",), (8,), "data") == 1


def test_other_devices_than_those_of_the_mesh_are_not_asked(hosts_of: Any) -> None:
    hosts_of(0, 0, 1, 1, 2, 2, 3, 3)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        assert _hosts.devices_per_host("data") == 1


@pytest.mark.parametrize(
    "exchange",
    [
        jaxcomm.mean("data", "int4", error_feedback=True),
        jaxcomm.majority_vote("data"),
        jaxcomm.low_rank_mean("data", 1, "bfloat16"),
        jaxcomm.factored_adam(jaxcomm.mean("data", "int8"), 1e-3),
        jaxcomm.sharded(jaxcomm.mean("data", "bfloat16")),
    ],
    ids=["mean", "vote", "low_rank", "factored_adam", "sharded"],
)
def test_devices_in_another_order_are_told(
    exchange: Any, hosts_of: Any, request: pytest.FixtureRequest
) -> None:
    """Neighbours of such a mesh are on different hosts, and an exchange would send more."""
    hosts_of(*HOSTS)
    is_split = "sharded" in request.node.callspec.id
    for order in range(8), (0, 2, 4, 6, 1, 3, 5, 7), range(7, -1, -1), (2, 3, 0, 1, 6, 7, 4, 5):
        with jax.set_mesh(jaxcomm.data_mesh(devices=[jax.devices()[i] for i in order])):
            params = {"w": jnp.zeros((16, 16))}
            params = jaxcomm.shard(params, "data") if is_split else params
            if order == (0, 2, 4, 6, 1, 3, 5, 7):
                with pytest.warns(UserWarning, match="the mesh has its devices in another order"):
                    exchange.init(params)
            else:
                exchange.init(params)


def test_what_names_its_algorithm_is_not_warned_of(hosts_of: Any) -> None:
    hosts_of(*HOSTS)
    devices = [jax.devices()[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    with jax.set_mesh(jaxcomm.data_mesh(devices=devices)):
        for exchange in jaxcomm.mean("data"), jaxcomm.mean("data", "int8", "ring"):
            exchange.init({"w": jnp.zeros((16, 16))})


def test_gpus_of_one_machine_may_have_a_process_each() -> None:
    class Gpu:
        platform, process_index, slice_index = "gpu", 3, 1

    class Cpu(Gpu):
        platform = "cpu"

    class Old:
        platform, process_index = "rocm", 3

    assert [_hosts.host_of(kind()) for kind in (Gpu, Cpu, Old)] == [1, 3, 3]


@pytest.mark.parametrize("near", ["direct", "ring", "halving_doubling", "circulant"])
@pytest.mark.parametrize("far", ["direct", "two_way_ring", "halving_doubling", "circulant"])
@pytest.mark.parametrize("axes", [("data",), ("a", "b")])
def test_hosts_along_an_axis_are_as_those_of_two(
    near: str, far: str, axes: tuple[str, ...]
) -> None:
    """Bit for bit, and byte for byte."""
    n, x = 40, np.random.default_rng(0).standard_normal((8, 40), np.float32)
    options = {"near": CASES[near].of(2), "far": CASES[far].of(4), "near_codec": "bfloat16"}
    shapes = {("data",): (8,), ("a", "b"): (2, 4)}
    kinds = (AxisType.Auto,) * 2
    apart = mean_program(
        jax.make_mesh((4, 2), ("far", "near"), kinds),
        n,
        codec="int8",
        algorithm=algorithms.hierarchical(**options),
    )
    mesh = jax.make_mesh(shapes[axes], axes, kinds[: len(axes)])
    algorithm = algorithms.hierarchical(**options, devices_per_host=2)
    along = mean_program(mesh, n, codec="int8", algorithm=algorithm)
    np.testing.assert_array_equal(mean_on_all(along, x), mean_on_all(apart, x))
    assert jaxcomm.wire_report(along).bytes_max == jaxcomm.wire_report(apart).bytes_max


def lowered(exchange: Any, params: Any) -> Any:
    """The program of an update on all devices, with the state of no step."""
    grads = jax.tree.map(lambda p: jnp.zeros((8, *p.shape)), params)
    return jax.jit(exchange.update).lower(grads, exchange.init(params), params)


SIGNS = jaxcomm.mean("data", "scaled_sign", error_feedback=True)


@pytest.mark.parametrize(
    ("exchange", "there", "back"),
    [
        (jaxcomm.mean("data", "bfloat16"), 16, 16),
        (jaxcomm.mean("data", "int8"), 8, 8),
        (jaxcomm.mean("data", "int4", error_feedback=True), 4, 4),
        (SIGNS, 1, 1),
        (jaxcomm.majority_vote("data"), 3, 1),  # counts of up to four, and the result
    ],
    ids=["bfloat16", "int8", "int4", "scaled_sign", "votes"],
)
def test_each_host_sends_one_vector(exchange: Any, there: int, back: int, hosts_of: Any) -> None:
    """To one other host: half a vector there and half back, whatever its number of devices."""
    n, sent = 2**16, {}
    for hosts in (0,) * 8, (0,) * 4 + (1,) * 4:
        hosts_of(*hosts)
        with jax.set_mesh(jaxcomm.data_mesh()):
            program = lowered(exchange, {"w": jnp.zeros((256, n // 256))}).compile()
        sent[hosts[-1]] = jaxcomm.wire_report(program).bytes_between((0,) * 4 + (1,) * 4)
    vector = n / 8 * (there + back) / 2
    assert vector <= sent[1] < 1.13 * vector + 200  # with scales
    assert sent[0] > 1.2 * sent[1]


def laws(exchange: Any, hosts: tuple[int, ...], hosts_of: Any) -> tuple[Any, Any, np.ndarray]:
    """Updates of a step, what the residuals hold afterwards, and the gradients' sum."""
    hosts_of(*hosts)
    grads = np.random.default_rng(0).standard_normal((8, 60, 33), np.float32)
    with jax.set_mesh(jaxcomm.data_mesh()):
        state = exchange.init(jnp.zeros((60, 33)))
        updates, state = jax.jit(exchange.update)(jnp.asarray(grads), state)
        residual = getattr(state, "residual", None)
        left = sum(np.asarray(x, np.float64).sum(0) for x in jax.tree.leaves(residual))
        return np.asarray(updates), left, grads.astype(np.float64)


WITHOUT_BOUND = ("qsgd", "terngrad")  # their error may exceed the value, so it is not fed back


@pytest.mark.parametrize("codec", sorted({*jaxcomm.codecs.BY_NAME}.difference(WITHOUT_BOUND)))
def test_nothing_is_lost_between_hosts(codec: str, hosts_of: Any) -> None:
    """Updates and residuals add up to the gradients."""
    exchange = jaxcomm.mean("data", codec, error_feedback=True)
    updates, left, grads = laws(exchange, HOSTS, hosts_of)
    total = 8 * updates.astype(np.float64) + left.reshape(updates.shape)
    np.testing.assert_allclose(total, grads.sum(0), atol=2e-5)


@pytest.mark.parametrize("codec", ["bfloat16", "float16", "int8", "cnat", *WITHOUT_BOUND])
def test_errors_are_no_larger_than_those_of_devices(codec: str, hosts_of: Any) -> None:
    """Values of a host are added before they are rounded."""
    exchange = jaxcomm.mean("data", codec)
    errors = []
    for hosts in HOSTS, (0,) * 8:
        updates, _, grads = laws(exchange, hosts, hosts_of)
        errors.append(np.square(updates - grads.mean(0)).mean())
    assert 0 < errors[0] < 1.2 * errors[1]


def test_votes_of_hosts_are_those_of_devices(hosts_of: Any) -> None:
    exchange = jaxcomm.majority_vote("data", ties="zero")
    by_hosts, _, grads = laws(exchange, (0, 0, 1, 1, 2, 2, 3, 3), hosts_of)
    np.testing.assert_array_equal(by_hosts, np.sign(np.sign(grads).sum(0)))


def test_what_hosts_do_is_chosen_for_their_number_and_part() -> None:
    long, medium = 10**7, 8 * 8 * 2**10 * 20
    for sent in "16 bits", "8 bits", "cnat", "codes", "votes", "shards":
        for values in (None, 1000, medium, long):
            chosen = usual(sent, 32, True, values, 4)
            assert isinstance(chosen, type(algorithms.hierarchical(near=DIRECT, far=DIRECT)))
            assert chosen.far == usual(sent, 8, True, values and values // 4)
            assert chosen.near == DIRECT
            assert (chosen.near_codec is None) == (sent == "votes")
        assert usual(sent, 8, False, None, 8) == DIRECT  # one host
        assert usual(sent, 8, False, None, 1) == DIRECT


@pytest.mark.parametrize("hosts", [(0,) * 8, (0,) * 4 + (1,) * 4], ids=["one", "two"])
def test_shards_of_hosts(hosts: tuple[int, ...], hosts_of: Any) -> None:
    """Gradients of split parameters are added on each host first, too: a quarter of them leaves."""
    hosts_of(*hosts)
    tx = jaxcomm.sharded(jaxcomm.mean("data", "bfloat16"))

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((x @ jaxcomm.gather(params)["w"]) ** 2)

    def step(params: Any, state: Any, x: Any) -> Any:
        split = jaxcomm.sharded_params(params, state)
        grads = jaxcomm.value_and_grad(loss, "data")(split, x)[1]
        return tx.update(grads, state, params)

    with jax.set_mesh(jaxcomm.data_mesh()):
        params = jaxcomm.shard({"w": jnp.ones((256, 256))}, "data")
        state = tx.init(params)
        x = jaxcomm.global_batch(np.eye(256, dtype=np.float32)[:64], "data")
        compiled = jax.jit(step).lower(params, state, x).compile()
        updates, _ = compiled(params, state, x)
    np.testing.assert_allclose(updates["w"][:64], 2 / 256 / 64, rtol=0.01)
    half = 2**16 / 2  # the values that the other host owns
    between = jaxcomm.wire_report(compiled).bytes_between((0,) * 4 + (1,) * 4)
    gradients = between - 7 * half  # parameters go around a ring, in float32
    times = 4 if len(set(hosts)) == 1 else 1
    assert gradients == pytest.approx(times * 2 * half, rel=0.01)


def test_bad_numbers_of_devices(mesh8: Mesh) -> None:
    numbers: list[Any] = [0, -1, 2.0, True, "2"]
    for bad in numbers:
        with pytest.raises(ValueError, match="positive number of devices, got"):
            algorithms.hierarchical(near=DIRECT, far=DIRECT, devices_per_host=bad)
    three = algorithms.hierarchical(near=DIRECT, far=DIRECT, devices_per_host=3)
    with pytest.raises(ValueError, match="needs a multiple of . devices, and the axis has 8"):
        mean_program(mesh8, 8, algorithm=three)


def test_explain_says_what_leaves_a_host(hosts_of: Any) -> None:
    """On two hosts of four: a vector of codes, where a float32 mean in a ring sends 7."""
    params = {"w": jnp.zeros((256, 256)), "b": jnp.zeros(256)}
    tx = jaxcomm.mean("data", "bfloat16")
    for hosts in (0,) * 4 + (1,) * 4, (0,) * 8, tuple(range(8)):
        hosts_of(*hosts)
        with jax.set_mesh(jaxcomm.data_mesh()):
            found = jaxcomm.explain(tx, params)
            compiled = lowered(tx, params).compile()
        if len(set(hosts)) != 2:
            assert found.host_bytes is None and "A host sends" not in str(found)
            continue
        loss = 7
        assert found.host_bytes == jaxcomm.wire_report(compiled).bytes_between(hosts) + loss
        said = "at most 132,871 bytes to other hosts in a step, 2.02 a value; a float32 mean 7.00"
        assert said in str(found)
        assert "bfloat16, hierarchical" in str(found)


def test_bytes_between_hosts_of_each_collective(mesh8: Mesh) -> None:
    """What leaves the second of two hosts, of three and of five devices."""
    hosts = (0, 0, 0, 1, 1, 1, 1, 1)
    spec = jax.P("data")

    def sent(f: Any) -> Any:
        run = jax.shard_map(f, mesh=mesh8, in_specs=spec, out_specs=spec, check_vma=False)
        compiled = jax.jit(run).lower(jax.ShapeDtypeStruct((8 * 64,), "float32")).compile()
        return jaxcomm.wire_report(compiled).bytes_between(hosts)

    def around(x: Any) -> Any:
        return jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)])

    assert sent(around) == 256
    assert sent(lambda x: jax.lax.all_gather(x, "data")[0]) == 7 * 256
    assert sent(lambda x: jax.lax.psum(x, "data")) == 2 * 7 / 8 * 256
    exchanged = lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True)  # noqa: E731
    assert sent(exchanged) == 5 * 3 * 32
    with pytest.raises(ValueError, match="of each of the 8 devices, got 7; write"):
        report = jaxcomm.wire_report(
            jax.jit(lambda x: x.sum())
            .lower(jax.ShapeDtypeStruct((8,), "float32", sharding=jax.NamedSharding(mesh8, spec)))
            .compile()
        )
        report.bytes_between(hosts[:7])


def test_explain_says_which_devices_send_the_same(mesh4x2: Mesh) -> None:
    tx = jaxcomm.mean("data", "int8")
    whole = jax.ShapeDtypeStruct((64, 64), "float32")
    split = jax.ShapeDtypeStruct(
        (64, 64), "float32", sharding=jax.NamedSharding(mesh4x2, jax.P(None, "model"))
    )
    with jax.set_mesh(mesh4x2):
        found = [jaxcomm.explain(tx, params) for params in ([whole], [split], [whole, split])]
        both = jaxcomm.explain(jaxcomm.mean(("data", "model"), "int8"), [whole])
    assert [x.alike for x in (*found, both)] == [("model",), (), (), ()]
    assert "on 8 devices, in groups of 4 that exchange" in str(found[0])
    assert "Devices that differ along 'model' send the same" in str(found[0])
    assert "in groups" not in str(both) and "send the same" not in str(both)


REAL = """
    import hashlib, jax.numpy as jnp, numpy as np
    import jaxcomm

    jax.set_mesh(jaxcomm.data_mesh())
    world, n = jax.device_count(), 2**19
    rows = np.random.default_rng(0).standard_normal((world, 512, n // 512), np.float32)
    mine = rows[2 * jax.process_index() :][:2]  # of this process's two devices
    grads = {"w": jaxcomm.global_batch(mine, "data")}
    params = jaxcomm.replicate({"w": np.zeros(rows.shape[1:], np.float32)})
    gathered = jax.experimental.multihost_utils.process_allgather
    for name in "bfloat16", "int8", "cnat", "int4", "scaled_sign":
        tx = jaxcomm.mean("data", name, error_feedback=True)
        state = tx.init(params)
        assert "hierarchical" in str(jaxcomm.explain(tx, params))
        updates, state = jax.jit(tx.update)(grads, state)
        left = gathered(state.residual.values[0], tiled=True).astype(np.float64).sum(0)
        total = world * np.asarray(updates["w"], np.float64) + left.reshape(rows.shape[1:])
        np.testing.assert_allclose(total, rows.astype(np.float64).sum(0), atol=1e-4)
        print(name, hashlib.sha256(np.asarray(updates["w"]).tobytes()).hexdigest())
    tx = jaxcomm.majority_vote("data", ties="zero")
    votes = np.asarray(jax.jit(tx.update)(grads, tx.init(params))[0]["w"])
    np.testing.assert_array_equal(votes, np.sign(np.sign(rows).sum(0)))
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("hosts", [2, 3])
def test_processes_of_two_devices(hosts: int) -> None:
    """Over TCP, with swaps between two of them: nothing is lost, and all have the same bits."""
    env = flags_of(devices=2)
    done = run_processes(hosts, REAL, env=env)
    assert len({run.stdout for run in done}) == 1
    assert len(done[0].stdout.splitlines()) == 5


def test_votes_of_more_than_16_devices_go_by_the_circulant_graph() -> None:
    assert [usual("votes", n, False).name for n in (16, 17)] == ["direct", "circulant"]
