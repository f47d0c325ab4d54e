"""The exchange that the planner chooses, for `config.sync.method = "auto"`."""

import contextlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxcomm import plan
from train import check, measure, state, step, sync
from train.errors import UserError
from train.workdir import write_whole

STEPS = 5  # timed without exchange, after one to warm up
_NAME_IT = "name the method by --config.sync.method"
# Fields that mean the same for every method, or do not affect the exchange; `auto` keeps them.
_OF_ALL = {"exempt", "implementation", "dense_steps", "local_momentum", "nesterov", *sync.ADAM}


def resolved(
    config: Any,
    workdir: Path,
    gradient: Any,
    params: Any,
    example: Any,
    optimizer: state.Optimizer,
    goes_on: bool = False,
) -> Any:
    """`config.sync`, or the planner's choice for `method="auto"`.

    The step without exchange, messages and codecs are measured, the leading methods of
    `config.network.quality` are timed, and the fastest is used. A run that continues keeps the
    choice of its beginning.

    Args:
      config: a config of `configs/`.
      workdir: where the choice is kept.
      gradient: the result of `step.make_gradient`.
      params: the parameters.
      example: a batch.
      optimizer: the result of `state.make_optimizer`.
      goes_on: whether the run continues from a checkpoint; a new one chooses anew.

    Raises:
      UserError: for a cluster, costs or a choice that cannot be read, or a cluster or costs for
        another number of devices.
    """
    chosen, mesh = config.sync.copy_and_resolve_references(), jax.sharding.get_mesh()
    if config.sync.method != "auto":
        _use_algorithms_of(config.network, mesh.size)
        return chosen
    file = workdir / "exchange.json"
    # Only process 0 looks: on a shared folder others may see a file later, and would plan alone.
    if goes_on and int(multihost_utils.broadcast_one_to_all(np.int32(file.exists()))):
        try:
            chosen.update(_kept(file))
        except (KeyError, TypeError) as error:
            raise UserError(f"{file} is of another version: {error}; {_NAME_IT}") from error
        return chosen
    with _told_as_network():
        cluster = _cluster(config.network, mesh.size)
    if cluster is None:
        chosen.method = "mean"
        return chosen
    milliseconds = 1e3 * _step_seconds(gradient, params, example, optimizer)
    try:
        exempt = tuple(chosen.exempt or ())
        load = plan.workload(params, milliseconds, accumulate=chosen.every, exempt=exempt)
    except ValueError as error:
        raise UserError(f"config.sync.exempt: {error}") from error
    allowed = _allowed(config, mesh.size, cluster.devices_per_host)
    found = plan.plan(cluster, load, config.network.quality, allowed, reorder=False)
    found = plan.timed(found, list(mesh.devices.flat))
    fields = _fields(chosen, found.choice.method)
    if jax.process_index() == 0:
        print("\n".join(["config.sync.method=auto", *found.lines(rows=5)]), flush=True)
        write_whole(file, json.dumps({"headline": found.headline, "config": fields}) + "\n")
    chosen.update(fields)
    return chosen


def _allowed(config: Any, devices: int, per_host: int) -> list[plan.Method]:
    """The methods of the wanted quality that go with the optimizer and the rest of the config."""
    name = config.optimizer.name
    kind = name if name in ("sgd", "muon") else "adam"
    quality = config.network.quality
    every = plan.methods(quality, per_host > 1, optimizer=kind, per_host=per_host)
    return [method for method in every if _fits(config, method, devices)]


def _fields(sync_config: Any, method: plan.Method) -> dict[str, Any]:
    """The fields of `config.sync` that make a method, whatever they were for another one."""
    others = {name for _, names in sync.METHODS.values() for name in names} - _OF_ALL
    fields = {name: None for name in sorted(others) if name in sync_config} | method.config
    if jax.default_backend() != "cpu" and fields.get("algorithm") == "direct":
        fields["algorithm"] = None  # which also goes by hosts, where jax knows them
    if sync_config.every > 1:  # each device then has its own optimizer
        fields.pop("local_optimizer", None)
    return fields


def _fits(config: Any, method: plan.Method, devices: int) -> bool:
    """Whether the rest of the config goes with a method, such as `every` or `gather`."""
    if method.family == "float16" or method.every > 1:  # local steps need rates of their own
        return False
    if (method.family, method.algorithm) == ("float32", "hierarchical"):  # no name stands for it
        return False
    changed = config.copy_and_resolve_references()
    changed.sync.update(_fields(changed.sync, method))
    # The plan has them; they say nothing of a method.
    changed.network.update(cluster="", costs="", quality=check.NETWORK["quality"])
    if config.data.shards != "shuffled" and _is_biased(changed, config):
        return False
    try:
        check.fit(changed, devices)
        sync.build(changed.sync, (), changed.steps)
    except UserError:
        return False
    return True


def _is_biased(config: Any, asked: Any) -> bool:
    """Whether the exchange is biased where devices hold different data, and `asked` is not."""
    is_new = config.sync.local_optimizer and not asked.sync.local_optimizer
    is_own_adam = is_new and config.optimizer.name != "sgd"
    return is_own_adam or config.sync.method == "majority_vote"


def _kept(file: Path) -> dict[str, Any]:
    """The fields of `config.sync` that a run chose at its beginning."""
    try:
        return dict(json.loads(file.read_text())["config"])
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise UserError(
            f"{file}, the exchange that the run chose at its beginning, cannot be read: {error}; "
            f"{_NAME_IT}"
        ) from error


def _say_what_is_measured(network: Any) -> None:
    """Says on process 0 why nothing is printed for a while."""
    parts = "" if network.costs else ", messages, codes"
    if jax.process_index() == 0:
        print(
            f"config.sync.method=auto measures a step without exchange{parts} and the leading "
            "exchanges, which may take minutes",
            file=sys.stderr,
            flush=True,
        )


@contextlib.contextmanager
def _told_as_network() -> Iterator[None]:
    """Names in an error the part of the config that it is about."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(f"config.network: {error}") from error


def _use_algorithms_of(network: Any, devices: int) -> None:
    """Makes `algorithm=None` the fastest one on the cluster of the config, if it names one."""
    with _told_as_network():
        declared = _declared(network, devices)
        costs = plan.read_costs(network.costs) if network.costs and declared else None
        plan.use(declared and plan.load_cluster(network.cluster, costs=costs))


def _declared(network: Any, devices: int) -> plan.Cluster | None:
    """The cluster that the config names."""
    declared = plan.load_cluster(network.cluster) if network.cluster else None
    if declared is not None and declared.devices != devices:
        raise ValueError(f"{network.cluster} has {declared.devices} devices, this run {devices}.")
    return declared


def _cluster(network: Any, devices: int) -> plan.Cluster | None:
    """The devices with their costs; None for a single one."""
    declared = _declared(network, devices)
    known = plan.read_costs(network.costs) if network.costs else None
    if devices == 1:
        return None
    _say_what_is_measured(network)
    costs = known or plan.probe(cluster=declared)
    if declared is not None:
        return plan.load_cluster(network.cluster, costs=costs)
    # Links that are not described are as fast as a message to the next device.
    of_process = Counter(device.process_index for device in jax.sharding.get_mesh().devices.flat)
    each = set(of_process.values()).pop() if len(set(of_process.values())) == 1 else 1
    if 1 < each < devices:
        nodes = {"hosts": devices // each, "rate": "unlimited", "nodes.devices": each}
        return plan.load_cluster("star", nodes, costs)
    return plan.cluster(plan.fabrics.star("these devices", devices, "unlimited"), costs)


def _step_seconds(gradient: Any, params: Any, example: Any, optimizer: state.Optimizer) -> float:
    """The median of a few steps without exchange, on the slowest process."""
    tx = sync.chained({}, sync.no_exchange({}), optimizer)
    at = state.init(jax.tree.map(jnp.copy, params), tx)
    program = step.compile_step(step.make_train_step(gradient, tx), at, example)
    times = []
    for _ in range(1 + STEPS):
        measure.barrier()
        start = time.perf_counter()
        at, metrics = program(at, example)
        jax.block_until_ready((at, metrics))
        times.append(time.perf_counter() - start)
    return measure.slowest(statistics.median(times[1:]))
