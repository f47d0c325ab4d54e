"""How the devices agree on a gradient: one row for each method of jaxcomm.

A new method needs a row in METHODS, and its options in `config.sync`.
"""

import difflib
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

import jaxcomm
from train.calls import read_call
from train.errors import UserError, choose
from train.models.transformer import SPLIT, STACK
from train.state import Optimizer, decayed, skipping, whole

AXIS = "data"


def majority_vote(
    axis_name: str, *, local_momentum: float = 0.0, correct_every: int = 0, **options: Any
) -> optax.GradientTransformation:
    """The majority of signs of gradients, corrected or not, or of each device's momentum."""
    chain = [jaxcomm.majority_vote(axis_name, **options)]
    if local_momentum:
        chain.insert(0, jaxcomm.local(axis_name, optax.ema(local_momentum)))
    if correct_every:
        shared = options.keys() & BUCKETS
        mean = jaxcomm.mean(axis_name, "bfloat16", **{name: options[name] for name in shared})
        chain.insert(0, jaxcomm.control_variates(mean, correct_every))
    return optax.chain(*chain) if len(chain) > 1 else chain[0]


def one_bit_adam(
    axis_name: str, *, total_steps: int, dense_steps: int | None = None, **options: Any
) -> optax.GradientTransformation:
    """1-bit Adam, which is an optimizer: the one after it only scales (`scale`).

    With neither `dense_steps` nor `variance_stability`, a share of the run is dense.
    """
    if dense_steps is None and "variance_stability" not in options:
        dense_steps = math.ceil(DENSE_SHARE * total_steps)
    if dense_steps is not None:
        options["dense_steps"] = dense_steps
    return jaxcomm.one_bit_adam(axis_name, 1.0, mask=decayed, **options)


DENSE_SHARE = 0.15  # of a run with 1-bit Adam, unless the config says more
ADAM = ("b1", "b2", "eps", "weight_decay")


def factored_adam(
    axis_name: str, *, codec: Any = "scaled_sign", **options: Any
) -> optax.GradientTransformation:
    """Factored Adam on a mean whose errors are fed back; the optimizer after it only scales."""
    own = {name: options.pop(name) for name in (*ADAM, "nesterov") if name in options}
    exchange = jaxcomm.mean(axis_name, codec, error_feedback=True, **options)
    return jaxcomm.factored_adam(exchange, 1.0, mask=decayed, **own)


def low_rank_mean(axis_name: str, *, rank: int = 4, **options: Any) -> optax.GradientTransformation:
    """PowerSGD."""
    return jaxcomm.low_rank_mean(axis_name, rank, **options)


def sparse_mean(
    axis_name: str, *, dense_exchanges: int = 0, **options: Any
) -> optax.GradientTransformation:
    """A mean of the largest values; dense exchanges use the same momentum as the others."""
    return jaxcomm.sparse_mean(axis_name, dense_steps=dense_exchanges, **options)


# Field -> what a call in it may name.
CALLS: dict[str, dict[str, Callable[..., Any]]] = {
    "codec": jaxcomm.codecs.BY_NAME,
    "second_hop": jaxcomm.codecs.BY_NAME,
    "algorithm": jaxcomm.algorithms.BY_NAME | jaxcomm.sparse.BY_NAME,
}

# Arguments that several methods share, and those of votes, of sparse means and of 1-bit Adam alone.
BUCKETS = ("exempt", "bucket_mib", "bucket_order")
CODED = ("codec", "algorithm", *BUCKETS, "residual_dtype", "seed", "implementation")
_FED_BACK = ("algorithm", "error_feedback", *BUCKETS, "residual_dtype")
_VOTES = ("ties", "zeros", "local_momentum", "correct_every")
_SPARSE = ("density", "dense_exchanges", "momentum_correction", "residual_decay", "measure_xi")
_ONE_BIT = ("total_steps", "dense_steps", "variance_stability")

# Name -> (factory, the arguments that it takes from config.sync and the order of gradients).
METHODS: dict[str, tuple[Callable[..., optax.GradientTransformation], tuple[str, ...]]] = {
    "mean": (jaxcomm.mean, (*CODED, "error_feedback", "second_hop")),
    "majority_vote": (majority_vote, (*_VOTES, *_FED_BACK, "seed")),
    "factored_adam": (factored_adam, (*ADAM, "nesterov", *CODED, "second_hop")),
    "one_bit_adam": (one_bit_adam, (*ADAM, *_ONE_BIT, *BUCKETS)),
    "sparse_mean": (sparse_mean, (*_SPARSE, *_FED_BACK, "implementation")),
    "low_rank_mean": (low_rank_mean, ("rank", *CODED)),
    "none": (jaxcomm.no_exchange, ()),
}


def build(
    config: Any, bucket_order: Sequence[str], steps: int, seed: int = 0
) -> optax.GradientTransformation:
    """Makes the transformation that `config.sync` names.

    Args:
      config: `config.sync`: `method` and its options. An option that is missing or None has the
        method's default; fields of other methods are ignored. A codec or an algorithm is a name or
        a call, such as "qsgd(levels=7)". With `dense_steps`, that many steps exchange in float32
        first; the method none never exchanges.
      bucket_order: the paths of the parameters, as `jaxcomm.backward_order` finds them.
      steps: the length of the run.
      seed: the seed of random rounding, of coins, and of the first factors.

    Returns:
      The first transformation of the optimizer's chain: local gradients in, equal updates out.

    Raises:
      UserError: if there is no such method, or it refuses its options.
    """
    auto = {"auto": METHODS["none"]}  # `planned.resolved` has replaced it
    factory, names = choose(METHODS | auto, config.method, "config.sync.method")
    # Gradients of split parameters travel the way that the parameters are gathered.
    order = None if config.get("gather") else bucket_order
    options = {**config, "bucket_order": order, "total_steps": steps, "seed": seed}
    options["dense_exchanges"] = dense_exchanges(config)
    options = {name: value for name, value in options.items() if value not in (None, "None")}
    for field in CALLS.keys() & options.keys():
        known = algorithms(config.method) if field == "algorithm" else CALLS[field]
        options[field] = read_call(options[field], known, f"config.sync.{field}")
    _check_exempt(options.get("exempt", ()), bucket_order)
    try:
        tx = factory(AXIS, **{name: options[name] for name in names if name in options})
        has_its_own = {"dense_steps", "dense_exchanges"}.intersection(names)
        if config.method != "none" and not has_its_own:
            if dense_exchanges(config) and config.method == "factored_adam":
                raise UserError(
                    f"config.sync.dense_steps: {config.method} is an optimizer, which has no dense "
                    "steps; set --config.sync.dense_steps=0"
                )
            tx = jaxcomm.dense_first(tx, dense_exchanges(config))
        return _sharded(tx, config)
    except (TypeError, ValueError) as error:
        raise UserError(f"config.sync: {error}") from error


def algorithms(method: str) -> Mapping[str, Callable[..., Any]]:
    """The algorithms that a method accepts, by name; all of them if it accepts none."""
    _, names = METHODS.get(method, METHODS["none"])
    if method == "sparse_mean":
        return jaxcomm.sparse.BY_NAME
    if "algorithm" not in names:
        return CALLS["algorithm"]
    # XLA has no votes, and two_clusters is for votes alone.
    refused = "native" if method == "majority_vote" else "two_clusters"
    return {name: make for name, make in jaxcomm.algorithms.BY_NAME.items() if name != refused}


def chained(
    config: Any, exchange: optax.GradientTransformation, optimizer: Optimizer
) -> optax.GradientTransformation:
    """The exchange before the optimizer or, with `local_optimizer`, in the middle of it.

    Its state is that of the exchange and that of the rest. With `local_optimizer` the first is a
    pair: the state of what precedes the exchange, and that of the exchange.
    """
    if config.get("local_optimizer"):
        own = jaxcomm.local(AXIS, optimizer.step)
        return optax.chain(optax.chain(own, exchange), skipping(optimizer.decay), optimizer.rate)
    return optax.chain(exchange, whole(optimizer))


def state_of_exchange(config: Any, opt_state: Any) -> Any:
    """The state of the exchange within the state of what `chained` returns."""
    return opt_state[0][1] if config.get("local_optimizer") else opt_state[0]


def joined(
    config: Any, exchange: optax.GradientTransformation, optimizer: Optimizer
) -> optax.GradientTransformation:
    """The exchange and the optimizer as `chained`; or with `every`, local steps by the optimizer.

    Args:
      config: `config.sync`.
      exchange: the result of `build`.
      optimizer: the optimizer of all devices or, with `every` above 1, of each device.
    """
    if config.every == 1:
        return chained(config, exchange, optimizer)
    if config.get("gather"):
        raise UserError(
            "config.sync: with every above 1 each device has its own copy of all parameters, so "
            "they cannot be split: leave out gather, or every"
        )
    nesterov = config.outer_momentum > 0
    outer = optax.sgd(config.outer_rate, config.outer_momentum or None, nesterov)
    try:
        return jaxcomm.local_steps(
            whole(optimizer), config.every, outer, exchange, fragments=config.fragments
        )
    except ValueError as error:
        raise UserError(f"config.sync: {error}") from error


def _sharded(tx: optax.GradientTransformation, config: Any) -> optax.GradientTransformation:
    """The exchange of parameters that are split over the devices, if `gather` names a codec."""
    if not config.get("gather"):
        return tx
    codec = read_call(config.gather, CALLS["codec"], "config.sync.gather")
    return jaxcomm.sharded(tx, codec)


def parts_codec(config: Any) -> jaxcomm.codecs.Codec:
    """The codec in which an optimizer sends parts of split matrices.

    It is that of `gather` where it rounds to nearest and has the range of float32; else float32, in
    which `fsdp` gathers too.
    """
    name = read_call(config.get("gather") or "float32", CALLS["codec"], "config.sync.gather")
    codec = jaxcomm.codecs.from_name(name)
    unfit = codec.is_random or codec.needs_error_feedback or codec.largest is not None
    return jaxcomm.codecs.from_name("float32") if unfit else codec


def make_mesh(config: Any, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """Devices (of all processes) along AXIS; with `fsdp`, neighbours in groups along SPLIT."""
    if config.fsdp == 1:
        return jaxcomm.data_mesh(AXIS, devices)
    if devices is None:  # Neighbours are on one machine, whatever the order of the processes.
        devices = sorted(jax.devices(), key=_machine)
    every = np.asarray(devices, object)
    kinds = (jax.sharding.AxisType.Auto,) * 2  # `jax.make_mesh` refuses devices of other machines
    return jax.sharding.Mesh(every.reshape(-1, config.fsdp), (AXIS, SPLIT), axis_types=kinds)


def _machine(device: Any) -> tuple[int, int, int]:
    """A device's machine: where there are several, each has its own slice."""
    return getattr(device, "slice_index", 0), device.process_index, device.id


def global_batch(batch: Any) -> Any:
    """Joins what the processes have read: rows over all devices of the mesh."""
    return jaxcomm.global_batch(batch, tuple(jax.sharding.get_mesh().axis_names))


def place(params: Any, config: Any) -> Any:
    """Puts parameters on the devices.

    Each device gets all of them. If `gather` names a codec, they are split over all devices; with
    `fsdp`, over those of each group.
    """
    axis, field = (AXIS, "gather") if config.get("gather") else (SPLIT, "fsdp")
    if axis == SPLIT and config.fsdp == 1:
        return jaxcomm.replicate(params)
    layers = [f"{STACK}/*"] if STACK in params else []
    try:
        return jaxcomm.shard(params, axis, exempt=tuple(config.exempt), layers=layers)
    except ValueError as error:
        raise UserError(f"config.sync.{field}: {error}") from error


def for_loss(params: Any, opt_state: Any) -> Any:
    """Parameters as the loss takes them: each device's own, or with the state of their exchange."""
    if isinstance(opt_state, jaxcomm.LocalStepsState):
        return jaxcomm.local_params(opt_state)
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_sharded)
    return jaxcomm.sharded_params(params, opt_state) if any(map(_is_sharded, leaves)) else params


def _is_sharded(node: Any) -> bool:
    return isinstance(node, jaxcomm.ShardedState)


def _check_exempt(patterns: Sequence[str], paths: Sequence[str]) -> None:
    for pattern in patterns:
        if paths and not fnmatch.filter(paths, pattern):
            parts = [path.split("/") for path in paths]
            known = {"/".join(part[:i]) + "/*" for part in parts for i in range(1, len(part))}
            near = difflib.get_close_matches(f"{pattern}/*", sorted(known), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(
                f"config.sync.exempt: no parameter fits {pattern!r}; {hint}paths are such as "
                f"{', '.join(paths[:3])}"
            )


def dense_exchanges(config: Any) -> int:
    """The number of dense exchanges: those whose `every` steps begin within `dense_steps`."""
    return -(-(config.get("dense_steps") or 0) // config.get("every", 1))


def last_dense(config: Any, steps: int) -> int | None:
    """The last dense step of a run; None if it has none, or if the state tells which one it is.

    Args:
      config: `config.sync`.
      steps: the length of the run.
    """
    dense, is_adam = config.get("dense_steps"), config.method == "one_bit_adam"
    if config.get("every", 1) > 1 or (is_adam and config.get("variance_stability") is not None):
        return None
    if dense is None and is_adam:
        dense = math.ceil(DENSE_SHARE * steps)
    return dense or None


def shares(config: Any, step: int, frozen_at: int) -> dict[str, float]:
    """Whether a step takes a branch, by its name in the compiled program.

    Args:
      config: `config.sync`.
      step: the number of the step, from 1.
      frozen_at: the earlier step in which the optimizer's own warm-up ended; 0 before that.
    """
    dense = (step - 1) // config.get("every", 1) < dense_exchanges(config)
    return {"from step 0": float(dense), "one_bit_adam: dense": float(not frozen_at)}


def no_exchange(config: Any) -> optax.GradientTransformation:
    """The exchange of the same step without communication, for measuring.

    Split parameters are still gathered.
    """
    return _sharded(jaxcomm.no_exchange(AXIS), config)
