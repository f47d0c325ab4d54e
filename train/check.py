"""What the fields of a config may hold; everything is checked before anything starts."""

import difflib
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from train import groups
from train.errors import UserError

# Methods of `train.sync` that only `scale` may follow.
OPTIMIZERS = ("factored_adam", "one_bit_adam")
# Fields of `config.optimizer` that `scale` does not use: their default, and the field of
# `config.sync` where those methods have the same option.
LEFT_OUT = {
    "weight_decay": (0.0, "weight_decay"),
    "momentum": (0.9, "b1"),
    "b2": (0.999, "b2"),
}
NETWORK = {"quality": "16bit", "probe_mib": 16}  # Defaults of fields that others may leave idle.
MASKED_MODEL = "bert"  # Also sees what follows a token.


class Rule(NamedTuple):
    """What a field may hold, in words and as a test."""

    says: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole(low: int) -> Rule:
    """Whole numbers from `low` on."""
    return Rule(f"a whole number of at least {low}", lambda v: _is_whole(v) and v >= low)


def count(low: int) -> Rule:
    """Whole numbers from `low` on that the devices count to."""
    says = f"a whole number of at least {low}, below 2^31"
    return Rule(says, lambda v: _is_whole(v) and low <= v < 2**31)


def number(says: str, holds: Callable[[Any], bool]) -> Rule:
    """Numbers for which a condition holds; NaN never qualifies."""
    return Rule(says, lambda v: _is_number(v) and holds(v))


def or_none(rule: Rule) -> Rule:
    """The same, or None."""
    return Rule(f"{rule.says}, or None", lambda v: v is None or rule.holds(v))


def each(rule: Rule) -> Rule:
    """One value, or one for each channel of an image."""
    return Rule(
        f"{rule.says}, or one for each channel",
        lambda v: all(map(rule.holds, v)) and len(v) > 0 if isinstance(v, tuple) else rule.holds(v),
    )


POSITIVE = number("a number above 0", lambda v: 0 < v < float("inf"))
NOT_NEGATIVE = number("a number of at least 0", lambda v: 0 <= v < float("inf"))
SHARE = number("a number from 0 to below 1", lambda v: 0 <= v < 1)
FINITE = number("a finite number", lambda v: abs(v) < float("inf"))
NAME = Rule("a name", lambda v: isinstance(v, str) and v != "")
TEXT = Rule("a text", lambda v: isinstance(v, str))
YES_OR_NO = Rule("True or False", lambda v: isinstance(v, bool))
QUALITIES = ("exact", "16bit", "unbiased", "any")
SCORES = ("test_loss", "test_accuracy")  # By which checkpoints are compared.
DTYPES = ("float32", "bfloat16")  # float16 would need a scaled loss

# Every config has these fields. The methods of `config.sync` check their own options.
FIELDS = {
    "seed": Rule("a whole number from 0 to 4294967295", lambda v: _is_whole(v) and 0 <= v < 2**32),
    "steps": count(1),
    "batch_size": whole(1),
    "microbatches": whole(1),
    "label_smoothing": SHARE,
    "eval_every": whole(1),
    "measure_steps": whole(1),
    "data.name": NAME,
    "data.data_dir": TEXT,
    "data.train_split": NAME,
    "data.test_split": NAME,
    "data.shards": NAME,
    "data.augment": NAME,
    "data.image_size": whole(0),
    "data.masked": SHARE,
    "model.name": NAME,
    "model.dtype": Rule(f"one of {', '.join(DTYPES)}", lambda v: v in DTYPES),
    "optimizer.name": NAME,
    "optimizer.learning_rate": NOT_NEGATIVE,
    "optimizer.warmup_steps": whole(0),
    "optimizer.momentum": SHARE,
    "optimizer.b2": SHARE,
    "optimizer.nesterov": YES_OR_NO,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.clip_norm": or_none(POSITIVE),
    "sync.method": NAME,
    "sync.exempt": Rule(
        "a tuple of patterns",
        lambda v: isinstance(v, tuple | list) and all(isinstance(p, str) for p in v),
    ),
    "sync.dense_steps": or_none(count(0)),
    "sync.bucket_mib": or_none(POSITIVE),
    "sync.local_momentum": SHARE,
    "sync.local_optimizer": YES_OR_NO,
    "sync.every": count(1),
    "sync.fsdp": whole(1),
    "sync.outer_rate": POSITIVE,
    "sync.outer_momentum": SHARE,
    "sync.fragments": whole(1),
    "sync.correct_every": count(0),
    "guard.bad_steps": whole(1),
    "guard.replicas_every": whole(1),
    "guard.step_seconds": NOT_NEGATIVE,
    "inspect.every": whole(0),
    "checkpoint.every": whole(1),
    "checkpoint.keep": whole(1),
    "checkpoint.best": Rule(f"{' or '.join(SCORES)}, or empty", lambda v: v in ("", *SCORES)),
    "checkpoint.resume": YES_OR_NO,
    "profile.steps": whole(0),
    "network.gigabits": or_none(POSITIVE),
    "network.probe_mib": whole(1),
    "network.cluster": TEXT,
    "network.costs": TEXT,
    "network.quality": Rule(f"one of {', '.join(QUALITIES)}", lambda v: v in QUALITIES),
}
# Checked where a config has them.
OPTIONAL = {
    "data.mean": each(FINITE),
    "data.std": each(POSITIVE),
    "data.sequence_length": or_none(whole(1)),
}


def fields(config: Any) -> None:
    """Raises if a field is missing or holds a value that it may not.

    Args:
      config: a config of `configs/`.

    Raises:
      UserError: names the field, what it may hold, and what it holds.
    """
    if not hasattr(config, "to_dict"):
        raise UserError(
            f"--config: get_config() returns {type(config).__name__}, not a "
            "ml_collections.ConfigDict"
        )
    found = dict(flat(config.to_dict()))
    for name, rule in FIELDS.items():
        if name not in found:
            raise UserError(
                f"the config has no field {name}, {rule.says}; configs/bases/run.py has all fields"
            )
    free = (name for name in found if name.startswith("model.") and name not in FIELDS)
    rules = FIELDS | OPTIONAL | {name: _model_rule(found[name]) for name in free}
    for name, rule in rules.items():  # In order: other mistakes may follow from `steps`.
        if name in found and not rule.holds(value := found[name]):
            near = difflib.get_close_matches(str(value), DTYPES, 1) if "dtype" in name else []
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{name} is {value!r}; it must be {rule.says}{hint}")


def _model_rule(value: Any) -> Rule:
    """Sizes of a model are above 0; its names and switches are for the model to check."""
    if _is_number(value):
        return POSITIVE
    if isinstance(value, tuple | list) and all(map(_is_number, value)):
        return Rule("one or more whole numbers above 0", lambda v: len(v) > 0 and min(v) > 0)
    return Rule("anything", lambda v: True)


def flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a config and their values, by names such as "sync.method"."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def fit(config: Any, world: int) -> None:
    """Raises if the batch does not fit the devices, or parts of the config do not fit together.

    Args:
      config: a config of `configs/`.
      world: number of devices of all processes.

    Raises:
      UserError: says what to type instead.
    """
    _fit_optimizer(config)
    method, every = config.sync.method, config.sync.every
    if method in (*OPTIMIZERS, "majority_vote", "none") and every > 1:
        raise UserError(
            f"config.sync.method={method} cannot average what devices did in {every} steps; use "
            "mean, or --config.sync.every=1"
        )
    if config.steps % every:
        raise UserError(
            f"config.steps={config.steps} is not divisible by config.sync.every={every}: what "
            "devices do after the last exchange would be lost; set "
            f"--config.steps={-(-config.steps // every) * every}"
        )
    if config.sync.fsdp > 1:
        groups.fit(config.sync, world)
    _fit_split(config.sync)
    _fit_local_steps(config.sync)
    _fit_network(config.network, config.sync)
    if (config.sync.correct_every or 0) > config.steps:
        raise UserError(
            f"config.sync.correct_every={config.sync.correct_every} is more than config.steps="
            f"{config.steps}: votes would never be corrected; lower it, or set 0"
        )
    fit_to_evaluate(config, world)
    if config.optimizer.warmup_steps > config.steps:
        raise UserError(
            f"config.optimizer.warmup_steps={config.optimizer.warmup_steps} is more than "
            f"config.steps={config.steps}: the learning rate would not reach its peak; set "
            f"--config.optimizer.warmup_steps={config.steps // 10}, or more steps"
        )


def _fit_network(network: Any, sync: Any) -> None:
    """Raises if a field of the network has no effect."""
    method = sync.method
    if network.cluster and method != "auto" and sync.algorithm is not None:
        raise UserError(
            f"config.network.cluster={network.cluster} is for choosing the algorithm, and "
            f"config.sync.algorithm={sync.algorithm} names it; leave out one"
        )
    if network.costs and not (network.cluster or method == "auto"):
        raise UserError(
            f"config.network.costs={network.costs} has no effect without config.network.cluster or "
            "--config.sync.method=auto; leave it out, or add one of these"
        )
    if network.quality != NETWORK["quality"] and method != "auto":
        raise UserError(
            f"config.network.quality={network.quality} is for --config.sync.method=auto, and has "
            f"no effect on {method}; leave it out, or set --config.sync.method=auto"
        )
    if network.probe_mib != NETWORK["probe_mib"] and network.gigabits is not None:
        raise UserError(
            f"config.network.probe_mib={network.probe_mib} is for measuring the network, and "
            f"config.network.gigabits={network.gigabits} says how fast it is; leave out one"
        )


def fit_to_evaluate(config: Any, world: int) -> None:
    """`fit`, for what a test needs: the model, the data and the batch."""
    if config.data.masked and config.model.name != MASKED_MODEL:
        raise UserError(
            f"config.data.masked={config.data.masked} hides tokens of a text, and config.model."
            f"name={config.model.name} does not predict them; set --config.data.masked=0"
        )
    if config.model.name == MASKED_MODEL and not config.data.masked:
        raise UserError(
            f"config.model.name={MASKED_MODEL} sees the whole row, so it would read off each next "
            "token; set --config.data.masked=0.15"
        )
    size, unit = config.batch_size, world * config.microbatches
    if size % unit:
        lower, upper = size // unit * unit, -(-size // unit) * unit
        raise UserError(
            f"batch_size {size} is not divisible by {world} devices x {config.microbatches} "
            f"microbatches; use {f'{lower} or ' if lower else ''}{upper}"
        )


def steps_left(steps: int, saved: int | None) -> None:
    """Raises if the checkpoint is from a later step than the last of the run.

    Args:
      steps: the length of the run.
      saved: the step of the checkpoint from which it continues; None if it begins anew.
    """
    if saved is not None and steps < saved:
        raise UserError(
            f"config.steps={steps} is less than the {saved} steps of the checkpoint; set "
            f"--config.steps={saved} or more, or choose another --workdir"
        )


def _fit_local_optimizer(sync: Any) -> None:
    """Raises if a method cannot take each device's own optimizer, or is an optimizer itself."""
    for field, is_in_the_way, why in (
        ("method", sync.method in OPTIMIZERS, "is an optimizer itself"),
        ("every", sync.every > 1, "has each device's own optimizer already"),
        ("gather", bool(sync.gather), "exchanges gradients of parameters that are split"),
        ("correct_every", bool(sync.correct_every), "corrects gradients"),
        ("local_momentum", sync.local_momentum > 0, "is a momentum of its own"),
        ("momentum_correction", bool(sync.momentum_correction), "is a momentum of its own"),
    ):
        if is_in_the_way:
            raise UserError(
                f"config.sync.{field}={sync[field]} {why}; leave it out, or set "
                "--config.sync.local_optimizer=False"
            )


def _fit_optimizer(config: Any) -> None:
    """Raises if the optimizer does not fit the exchange, or one of its fields has no effect."""
    method, optimizer = config.sync.method, config.optimizer.name
    if method in OPTIMIZERS and optimizer != "scale":
        raise UserError(
            f"config.sync.method={method} is an optimizer itself, and {optimizer} would follow "
            "it; set --config.optimizer.name=scale, and --config.optimizer.learning_rate"
        )
    if method not in OPTIMIZERS and optimizer == "scale":
        raise UserError(
            f"config.optimizer.name=scale only scales what {' or '.join(OPTIMIZERS)} made, and "
            f"after config.sync.method={method} it would increase the loss; set "
            "--config.optimizer.name=sgd, adamw or muon"
        )
    unsaid, _ = LEFT_OUT["b2"]
    if optimizer == "sgd" and config.optimizer.b2 != unsaid:
        raise UserError(
            f"config.optimizer.b2={config.optimizer.b2} has no effect on sgd, which keeps no "
            f"squares; set --config.optimizer.b2={unsaid}, or --config.optimizer.name=adamw"
        )
    if config.sync.local_optimizer:
        _fit_local_optimizer(config.sync)
        return  # it clips each device's gradient
    if config.optimizer.clip_norm is not None and method in (*OPTIMIZERS, "majority_vote"):
        why = (
            "makes signs, whose norm is always the same"
            if method == "majority_vote"
            else "returns an update instead"
        )
        raise UserError(
            f"config.optimizer.clip_norm={config.optimizer.clip_norm} clips the mean gradient, and "
            f"{method} {why}; leave it out (None in the config file). Your own program can "
            "clip each device's gradient before it: jaxcomm.local(axis_name, "
            "optax.clip_by_global_norm(...)), as --config.sync.local_optimizer=True does before "
            "a vote"
        )
    if optimizer == "scale" and config.optimizer.nesterov:
        raise UserError(
            f"config.optimizer.nesterov=True has no effect after {method}; set "
            "--config.optimizer.nesterov=False, and for factored_adam --config.sync.nesterov=True"
        )
    for field, (unsaid, own) in LEFT_OUT.items() if optimizer == "scale" else ():
        value = config.optimizer[field]
        if value != unsaid and config.sync.get(own) is None:
            raise UserError(
                f"config.optimizer.{field}={value} has no effect after {method}; set "
                f"--config.sync.{own}={value}, or --config.optimizer.{field}={unsaid}"
            )


def _fit_split(sync: Any) -> None:
    """Raises if parameters that `gather` splits do not go with another option."""
    for field in ("dense_steps", "local_momentum", "correct_every"):
        if sync.get("gather") and sync.get(field):
            raise UserError(
                f"config.sync.gather={sync.gather} splits parameters, and does not go with "
                f"config.sync.{field}={sync[field]}; leave out one of them"
            )


def _fit_local_steps(sync: Any) -> None:
    """Raises for an option of local steps that has no effect."""
    for field, usual in (("outer_rate", 1.0), ("outer_momentum", 0.0), ("fragments", 1)):
        if sync.every == 1 and sync[field] != usual:
            raise UserError(
                f"config.sync.{field}={sync[field]} has no effect with config.sync.every=1; set "
                f"--config.sync.{field}={usual}, or --config.sync.every to the steps between two "
                "exchanges"
            )
