"""What else the training program refuses, passes on, and keeps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import config_dict
from running import read_config

import jaxcomm
from jaxcomm import plan
from jaxcomm.plan.families import Method
from train import check, planned, state, sync
from train.checkpoint import where_to_continue
from train.errors import UserError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eval_every", 0),
        ("measure_steps", 0),
        ("sync.every", 0),
        ("sync.fsdp", 0),
        ("sync.fragments", 0),
        ("guard.replicas_every", 0),
        ("optimizer.b2", 1.0),
        ("data.std", ()),
    ],
)
def test_fields(name: str, value: object) -> None:
    config = read_config("digits_resnet")
    with config.ignore_type(), config.unlocked():
        config.update_from_flattened_dict({name: value})
    with pytest.raises(UserError, match=f"^{name} is .*; it must be"):
        check.fields(config)


@pytest.mark.parametrize("method", check.OPTIMIZERS)
def test_optimizers_have_no_local_steps(method: str) -> None:
    config = read_config("digits_one_bit_adam")
    config.sync.method, config.sync.every = method, 2
    with pytest.raises(UserError, match=f"{method} cannot average what devices did in 2 steps"):
        check.fit(config, 4)


def test_split_parameters_are_not_corrected() -> None:
    config = read_config("digits_majority")
    config.sync.gather, config.sync.correct_every, config.sync.local_momentum = "int8", 4, 0.0
    with pytest.raises(UserError, match="gather=int8 .* with config.sync.correct_every=4; leave"):
        check.fit(config, 4)


def test_corrections_that_never_come_are_refused() -> None:
    config = read_config("digits_majority")
    config.sync.correct_every, config.steps = 21, 20
    with pytest.raises(UserError, match="correct_every=21 is more than config.steps=20: votes"):
        check.fit(config, 4)
    config.sync.correct_every = 20
    check.fit(config, 4)


def test_none_is_a_text_too() -> None:
    """As it is typed on a command line."""
    found = sync.build(config_dict.create(method="mean", codec="None"), (), 10)
    assert found.scheme == sync.build(config_dict.create(method="mean"), (), 10).scheme


def test_an_optimizer_has_no_dense_steps() -> None:
    config = config_dict.create(method="factored_adam", dense_steps=5)
    with pytest.raises(UserError, match="dense_steps: factored_adam is an optimizer, which has no"):
        sync.build(config, (), 10)


def test_a_control_never_exchanges() -> None:
    """Whatever the config of the method that it replaces: dense steps are of that method."""
    config = config_dict.create(method="none", dense_steps=3)
    with jax.set_mesh(jaxcomm.data_mesh(sync.AXIS, jax.devices()[:2])):
        tx, own = sync.build(config, (), 10), jnp.stack([jnp.zeros((2, 2)), jnp.full((2, 2), 2.0)])
        at, update = tx.init(jaxcomm.replicate({"w": jnp.zeros((2, 2))})), jax.jit(tx.update)
        for _ in range(4):
            updates, at = update(jaxcomm.mark_local({"w": own}), at)
            found = [np.asarray(shard.data)[0, 0] for shard in updates["w"].addressable_shards]
            assert found == [0, 2]


@pytest.mark.parametrize("local", [False, True])
def test_the_state_of_the_exchange(local: bool) -> None:
    config = config_dict.create(
        method="mean", codec="int8", error_feedback=True, every=1, local_optimizer=local
    )
    with jax.set_mesh(jaxcomm.data_mesh(sync.AXIS, jax.devices()[:2])):
        exchange = sync.build(config, (), 10)
        own = read_config("digits_resnet").optimizer
        tx = sync.joined(config, exchange, state.make_optimizer(own, 100))
        params = jaxcomm.replicate({"w": jnp.ones((8, 3))})
        found = sync.state_of_exchange(config, tx.init(params))
        assert type(found) is type(exchange.init(params))


def test_local_steps_have_their_fragments_and_rate() -> None:
    config = config_dict.create(
        method="mean", codec="float32", every=2, fragments=2, outer_rate=0.5, outer_momentum=0.0
    )
    with jax.set_mesh(jaxcomm.data_mesh(sync.AXIS, jax.devices()[:2])):
        alone = state.Optimizer(optax.sgd(1.0), optax.identity(), optax.identity())
        tx = sync.joined(config, sync.build(config, (), 10), alone)
        params = jaxcomm.replicate({"a": jnp.zeros((1, 1)), "b": jnp.zeros((1, 1))})
        at, ones, found = tx.init(params), jnp.ones((2, 1, 1)), []
        for _ in range(2):
            updates, at = tx.update({"a": ones, "b": ones}, at, params)
            found.append({name: float(x[0, 0]) for name, x in updates.items()})
    assert found[:2] == [{"a": -0.5, "b": 0.0}, {"a": 0.0, "b": -1.0}]


def test_split_parameters_take_no_local_steps() -> None:
    config = config_dict.create(
        method="mean", codec="float32", every=2, fragments=1, outer_rate=1.0, outer_momentum=0.0
    )
    config.gather = "float32"
    alone = state.Optimizer(optax.sgd(1.0), optax.identity(), optax.identity())
    with pytest.raises(UserError, match="cannot be split: leave out gather, or every"):
        sync.joined(config, sync.build(config, (), 10), alone)


def test_groups_are_within_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the processes."""

    class Device:
        def __init__(self, slice_index: int, process_index: int, id_: int) -> None:
            self.slice_index, self.process_index, self.id = slice_index, process_index, id_

    numbers = [(0, 0, 0), (1, 1, 1), (0, 2, 2), (1, 3, 3)]
    mixed = [Device(*each) for each in numbers]
    monkeypatch.setattr(jax, "devices", lambda: mixed)
    made: list[Any] = []
    monkeypatch.setattr(jax.sharding, "Mesh", lambda devices, *_, **__: made.append(devices))
    sync.make_mesh(config_dict.create(fsdp=2))
    assert [[d.slice_index for d in row] for row in made[0]] == [[0, 0], [1, 1]]


def test_a_control_with_split_parameters_gathers_them() -> None:
    config = config_dict.create(gather="int8")
    with jax.set_mesh(jaxcomm.data_mesh(sync.AXIS, jax.devices()[:2])):
        params = jaxcomm.shard({"w": jnp.ones((8, 8))}, sync.AXIS)
        state_ = sync.no_exchange(config).init(params)
        found, wanted = (f(params, state_)["w"] for f in (sync.for_loss, jaxcomm.sharded_params))
        assert type(found) is type(wanted)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    config = read_config("digits_resnet")
    config.network.cluster = str(tmp_path / "cluster.yaml")
    (tmp_path / "cluster.yaml").write_text("fabric: star\nhosts: 4\nrate: 1Gbit\n")
    yield config
    plan.use(None)


def test_what_the_planner_is_told(config: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The seconds of a step, what is exempt, and the measured costs."""
    config.sync.method, config.sync.exempt = "auto", ("head",)
    config.network.costs, costs = str(tmp_path / "costs.yaml"), plan.defaults("gpu")
    costs.save(config.network.costs)
    timed: list[plan.Plan] = []
    monkeypatch.setattr(plan, "timed", lambda found, devices: timed.append(found) or found)
    monkeypatch.setattr(planned, "_step_seconds", lambda *_: 0.1)
    params = {"w": jnp.zeros((64, 64)), "head": jnp.zeros((64, 8))}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        planned.resolved(config, tmp_path, None, params, None, None)
    (found,) = timed
    assert found.load.step_seconds == pytest.approx(0.1)
    assert found.load.exempt_values == 64 * 8
    assert found.cluster.costs == costs


def test_costs_choose_the_algorithm_that_none_stands_for(
    config: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    config.network.costs, costs = str(tmp_path / "costs.yaml"), plan.defaults("gpu")
    costs.save(config.network.costs)
    used: list[Any] = []
    monkeypatch.setattr(plan, "use", used.append)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        planned.resolved(config, tmp_path, None, None, None, None)
    assert used[0].costs == costs


def test_hosts_of_several_devices_are_compared_by_hosts(config: Any) -> None:
    """All but float32, which no config names."""
    config.network.quality = "16bit"
    found = {m.name for m in planned._allowed(config, 8, 2)}
    assert "bfloat16/hierarchical/2" in found and "float32/native" in found
    assert "float32/hierarchical/2" not in found


def test_direct_is_taken_as_it_was_timed(config: Any, monkeypatch: Any) -> None:
    """On CPUs; elsewhere it is what no algorithm stands for, which also goes by hosts."""
    direct = Method("bfloat16", "direct")
    assert planned._fields(config.sync, direct)["algorithm"] == "direct"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert planned._fields(config.sync, direct)["algorithm"] is None


def test_processes_of_several_devices_are_machines(config: Any, monkeypatch: Any) -> None:
    devices = np.array([SimpleNamespace(process_index=i // 2) for i in range(8)], object)
    monkeypatch.setattr(jax.sharding, "get_mesh", lambda: SimpleNamespace(devices=devices))
    monkeypatch.setattr(plan, "probe", lambda cluster: plan.defaults("cpu"))
    config.network.cluster = ""
    found = planned._cluster(config.network, 8)
    assert found is not None
    assert (found.devices, found.levels, found.devices_per_host) == (8, (4, 2), 2)


def test_the_first_step_is_not_timed(monkeypatch: Any) -> None:
    clock = iter([0.0, 9.0, *(x for i in range(planned.STEPS) for x in (10.0 * i, 10.0 * i + 2))])
    monkeypatch.setattr(planned.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(planned.measure, "barrier", lambda: None)
    monkeypatch.setattr(planned.measure, "slowest", lambda x: x)
    monkeypatch.setattr(planned.step, "compile_step", lambda *_: lambda at, batch: (at, {}))
    monkeypatch.setattr(planned.step, "make_train_step", lambda *_: None)
    monkeypatch.setattr(planned.state, "init", lambda *_: 0)
    monkeypatch.setattr(planned.sync, "chained", lambda *_: None)
    assert planned._step_seconds(None, {}, None, None) == 2.0  # type: ignore[arg-type]


def test_a_restart_of_a_run_that_continues_and_has_nothing_whole(tmp_path: Path) -> None:
    """The launcher starts it again; what was there is damaged."""
    assert where_to_continue(tmp_path / "checkpoints", True, True) is None


def test_a_step_may_be_damaged_twice(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for _ in range(2):
        (folder / "3").mkdir(parents=True)
        assert where_to_continue(folder, False, True) is None
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoints", "damaged-checkpoint-3", "damaged-checkpoint-3-again"]


def test_the_stability_alone_ends_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(jaxcomm, "one_bit_adam", lambda *_, **options: found.append(options))
    for fields in ({}, {"variance_stability": 0.9}, {"variance_stability": 0.9, "dense_steps": 7}):
        sync.one_bit_adam("data", total_steps=100, **fields)
    assert [options.get("dense_steps") for options in found] == [15, None, 7]
