"""Configs: what their fields may hold, and that every method can be chosen on every config."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from absl import flags
from ml_collections import config_dict
from running import ROOT, read_config

import jaxcomm
from train import check, main, mistakes, state, sync
from train.errors import UserError

NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
VALUES: dict[str, Any] = {"True": True, "False": False}
PATHS = ("head/bias", "head/kernel", "stem/kernel")


@pytest.mark.parametrize("name", NAMES)
def test_every_method_on_every_config(name: str) -> None:
    """By flags alone: where one flag is not enough, the message says what else to type."""
    for method in sync.METHODS:
        config, typed = read_config(name), {"sync.method": method}
        while (message := refusal(config, typed)) is not None:
            flags = re.findall(r"--config\.([\w.]+)=(\w+)", message)
            if "scaled_sign" in str(config.sync.codec) and not flags:
                # What only some methods send in one bit; the message is the library's.
                assert "scaled_sign" in message and method in ("mean", "low_rank_mean")
                flags = [("sync.codec", "bfloat16")]
            assert flags and not typed.keys() & {field for field, _ in flags}, message
            typed |= {field: VALUES.get(v, int(v) if v.isdigit() else v) for field, v in flags}


@pytest.mark.parametrize("name", NAMES)
def test_every_config_as_it_is(name: str) -> None:
    assert refusal(read_config(name), {}) is None


def refusal(config: config_dict.ConfigDict, typed: dict[str, Any]) -> str | None:
    """What is said of a config with these flags before anything is compiled."""
    config.update_from_flattened_dict(typed)
    try:
        check.fields(config)
        check.fit(config, 4)
        exchange = sync.build(config.sync, PATHS, config.steps)
        sync.joined(config.sync, exchange, state.make_optimizer(config.optimizer, config.steps))
    except UserError as error:
        return str(error)
    return None


def changed(name: str, value: object) -> config_dict.ConfigDict:
    config = read_config("digits_resnet")
    with config.ignore_type(), config.unlocked():
        config.update_from_flattened_dict({name: value})
    return config


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seed", -1, "seed is -1; it must be a whole number from 0 to 4294967295"),
        ("steps", 0, "steps is 0; it must be a whole number of at least 1"),
        ("steps", 2**31, "it must be a whole number of at least 1, below 2.31"),
        ("steps", 2.5, "steps is 2.5; it must be a whole number"),
        ("steps", True, "steps is True; it must be a whole number"),
        ("label_smoothing", 1.0, "label_smoothing is 1.0; it must be a number from 0 to below 1"),
        ("batch_size", 0, "batch_size is 0; it must be a whole number of at least 1"),
        ("microbatches", 0, "microbatches is 0; it must be a whole number of at least 1"),
        ("data.std", 0.0, "data.std is 0.0; it must be a number above 0, or one for each channel"),
        ("data.mean", float("nan"), "data.mean is nan; it must be a finite number"),
        ("data.mean", (1.0, "2"), "data.mean is .*; it must be a finite number"),
        ("model.width", 0, "model.width is 0; it must be a number above 0"),
        ("model.stages", (), r"model.stages is \(\); it must be one or more whole numbers above 0"),
        ("model.stages", (1, 0), r"model.stages is \(1, 0\); it must be one or more whole"),
        ("model.dtype", "int8", "model.dtype is 'int8'; it must be one of float32, bfloat16"),
        ("model.dtype", "bfloat17", "model.dtype is 'bfloat17'; .*; did you mean bfloat16?"),
        ("optimizer.learning_rate", -1.0, "optimizer.learning_rate is -1.0; it must be a number"),
        ("optimizer.momentum", 1.0, "optimizer.momentum is 1.0; it must be a number from 0 to"),
        ("optimizer.clip_norm", 0.0, "clip_norm is 0.0; it must be a number above 0, or None"),
        ("sync.exempt", "head", "sync.exempt is 'head'; it must be a tuple of patterns"),
        ("sync.bucket_mib", 0.0, "sync.bucket_mib is 0.0; it must be a number above 0, or None"),
        ("sync.dense_steps", -1, "sync.dense_steps is -1; it must be a whole number of at least 0"),
        ("guard.bad_steps", 0, "guard.bad_steps is 0; it must be a whole number of at least 1"),
        ("checkpoint.every", 0, "checkpoint.every is 0; it must be a whole number of at least 1"),
        ("checkpoint.keep", 0, "checkpoint.keep is 0; it must be a whole number of at least 1"),
        ("checkpoint.resume", "yes", "checkpoint.resume is 'yes'; it must be True or False"),
        ("network.gigabits", 0.0, "network.gigabits is 0.0; it must be a number above 0, or None"),
        ("network.probe_mib", 0, "network.probe_mib is 0; it must be a whole number of at least 1"),
    ],
)
def test_fields(name: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check.fields(changed(name, value))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "network",
            "the config has no field network.gigabits, a number above 0, or None;",
        ),
        ("seed", "the config has no field seed, a whole number from 0"),
    ],
)
def test_what_is_missing(name: str, message: str) -> None:
    config = read_config("digits_resnet")
    with config.unlocked():
        del config[name]
    with pytest.raises(UserError, match=message):
        check.fields(config)


@pytest.mark.parametrize("config", [None, {"seed": 1}, 7])
def test_what_is_no_config(config: Any) -> None:
    with pytest.raises(UserError, match="returns (NoneType|dict|int), not a ml_collections.Config"):
        check.fields(config)


@pytest.mark.parametrize(
    ("size", "microbatches", "message"),
    [
        (3, 1, "batch_size 3 is not divisible by 4 devices x 1 microbatches; use 4$"),
        (62, 1, "batch_size 62 is not divisible by 4 devices x 1 microbatches; use 60 or 64$"),
        (64, 3, "batch_size 64 is not divisible by 4 devices x 3 microbatches; use 60 or 72$"),
    ],
)
def test_sizes(size: int, microbatches: int, message: str) -> None:
    config = changed("batch_size", size)
    config.microbatches = microbatches
    with pytest.raises(UserError, match=message):
        check.fit(config, 4)


def test_every_option_of_a_method_is_one_of_its_fields() -> None:
    own = {"axis_name", "exchange", "learning_rate", "mask", "dense_steps"}  # not of config.sync
    for name, (_, fields) in sync.METHODS.items():
        method = getattr(jaxcomm, "no_exchange" if name == "none" else name)
        assert set(inspect.signature(method).parameters) - own <= set(fields), name


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("digits")])
def test_a_short_run_of_the_digits_needs_one_flag(name: str) -> None:
    """Its warm-up is a share of it; the whole run has 50 steps of it."""
    config = read_config(name)
    assert config.optimizer.warmup_steps == 50
    assert refusal(config, {"steps": 24}) is None and config.optimizer.warmup_steps == 2
    assert refusal(config, {"optimizer.warmup_steps": 5, "steps": 240}) is None
    assert config.optimizer.warmup_steps == 5


def test_no_step_is_behind_the_last_exchange() -> None:
    config = changed("steps", 10)
    config.sync.every = 4
    with pytest.raises(UserError, match=r"10 is not divisible by config.sync.every=4.*steps=12$"):
        check.fit(config, 4)
    config.steps, config.optimizer.warmup_steps = 12, 12
    check.fit(config, 4)


def test_an_optimizer_behind_an_optimizer() -> None:
    config = changed("sync.method", "one_bit_adam")
    with pytest.raises(UserError, match="one_bit_adam is an optimizer itself, and sgd would"):
        check.fit(config, 4)
    config.optimizer.name, config.optimizer.weight_decay = "scale", 0.0
    check.fit(config, 4)


@pytest.mark.parametrize(
    ("field", "value", "own", "unsaid"),
    [
        ("weight_decay", 1.0, "weight_decay", 0.0),
        ("momentum", 0.5, "b1", 0.9),
        ("b2", 0.99, "b2", 0.999),
    ],
)
@pytest.mark.parametrize("method", check.OPTIMIZERS)
def test_nothing_is_dropped_behind_an_optimizer(
    method: str, field: str, value: float, own: str, unsaid: float
) -> None:
    """A field of `config.optimizer` that only scales; either cure that the message names helps."""
    config = changed("sync.method", method)
    config.optimizer.update({"name": "scale", "weight_decay": 0.0, field: value})
    message = f"optimizer.{field}={value} has no effect after {method}; set --config.sync.{own}="
    with pytest.raises(
        UserError, match=f"{message}{value}, or --config.optimizer.{field}={unsaid}"
    ):
        check.fit(config, 4)
    config.sync[own] = value
    check.fit(config, 4)
    config.sync[own], config.optimizer[field] = None, unsaid
    check.fit(config, 4)


@pytest.mark.parametrize("is_local", [False, True])
def test_sgd_keeps_no_squares(is_local: bool) -> None:
    config = changed("optimizer.b2", 0.99)
    config.sync.local_optimizer = is_local
    with pytest.raises(UserError, match=r"b2=0.99 has no effect on sgd.*--config.optimizer.b2=0.9"):
        check.fit(config, 4)
    config.optimizer.name = "adamw"
    check.fit(config, 4)


@pytest.mark.parametrize("method", [*check.OPTIMIZERS, "majority_vote"])
def test_only_a_mean_is_clipped(method: str) -> None:
    config = changed("sync.method", method)
    config.optimizer.clip_norm = 1.0
    if method in check.OPTIMIZERS:
        config.optimizer.update({"name": "scale", "weight_decay": 0.0})
    message = f"clip_norm=1.0 clips the mean gradient, and {method} .*leave it out .* jaxcomm.local"
    with pytest.raises(UserError, match=message):
        check.fit(config, 4)
    config.optimizer.clip_norm = None
    check.fit(config, 4)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("method", "factored_adam", "is an optimizer itself"),
        ("every", 4, "has each device's own optimizer already"),
        ("gather", "float32", "exchanges gradients of parameters that are split"),
        ("correct_every", 8, "corrects gradients"),
        ("local_momentum", 0.9, "is a momentum of its own"),
        ("momentum_correction", 0.9, "is a momentum of its own"),
    ],
)
def test_a_local_optimizer_needs_its_place(field: str, value: Any, why: str) -> None:
    config = read_config("digits_resnet")
    config.sync.local_optimizer = True
    check.fit(config, 4)
    config.sync[field] = value
    if field == "method":
        config.optimizer.name = "scale"
    with pytest.raises(UserError, match=f"config.sync.{field}={value} {why}; .*local_optimizer=F"):
        check.fit(config, 4)


def test_a_local_optimizer_clips_in_front_of_a_vote() -> None:
    config = read_config("digits_majority")
    config.optimizer.clip_norm = 1.0
    with pytest.raises(UserError, match="local_optimizer=True"):
        check.fit(config, 4)
    config.sync.local_optimizer = True
    check.fit(config, 4)


def test_scale_has_no_momentum_of_nesterov() -> None:
    config = read_config("digits_one_bit_adam")
    config.optimizer.nesterov = True
    with pytest.raises(UserError, match=r"nesterov=True has no effect after one_bit_adam"):
        check.fit(config, 4)


@pytest.mark.parametrize("method", ["majority_vote", "none"])
def test_local_steps_take_means(method: str) -> None:
    config = changed("sync.method", method)
    config.sync.every = 2
    with pytest.raises(UserError, match=f"{method} cannot average what devices did in 2 steps"):
        check.fit(config, 4)


@pytest.mark.parametrize("method", ["mean", "majority_vote", "none", "auto"])
def test_only_an_optimizer_is_scaled(method: str) -> None:
    """The sign of a gradient is that of the ascent: only optimizers turn it around."""
    config = changed("sync.method", method)
    config.optimizer.name = "scale"
    with pytest.raises(
        UserError, match=f"method={method} it would increase .* set --config.optimiz"
    ):
        check.fit(config, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fsdp": 3}, "fsdp=3: 8 devices do not form two or more groups of 3; use 1 or 2 or"),
        ({"fsdp": 8}, "fsdp=8: 8 devices do not form two or more groups of 8; use 1 or 2 or"),
        (
            {"fsdp": 2, "gather": "int8"},
            "config.sync.gather=int8 keeps them in another way; ",
        ),
        (
            {"fsdp": 2, "every": 4},
            "config.sync.every=4 keeps them in another way; set",
        ),
        ({"fsdp": 2, "method": "auto"}, "fsdp=2: the planner has no such groups; name a method"),
    ],
)
def test_groups_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    config = read_config("lm_transformer")
    config.sync.update(fields)
    with pytest.raises(UserError, match=message):
        check.fit(config, 8)


def test_what_a_config_says_of_its_argument_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = flags.Error(
        "flag --config: Error whilst parsing\n\nTraceback ...\nValueError: no size"
    )

    class Refusing:
        def __call__(self, argv: list[str]) -> list[str]:
            raise raised

    monkeypatch.setattr(main.flags, "FLAGS", Refusing())
    with pytest.raises(UserError) as told:
        main.parse(["train", "--config=configs/lm_transformer.py:huge"])
    assert str(told.value) == "--config: no size"


def test_sizes_of_the_language_model() -> None:
    with pytest.raises(ValueError, match="there is no size 'huge'; it is one of nano, mini"):
        read_config("lm_transformer", "huge")
    config = read_config("lm_transformer", "xl")
    check.fields(config)
    assert (config.model.depth, config.model.width, config.model.recompute) == (24, 2048, True)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("head", r"no parameter fits 'head'; did you mean 'head/\*'\? paths are such as head/bias"),
        ("hed", r"no parameter fits 'hed'; did you mean 'head/\*'\?"),
        ("zzz", "no parameter fits 'zzz'; paths are such as head/bias, head/kernel, stem/kernel"),
    ],
)
def test_patterns_that_fit_nothing(pattern: str, message: str) -> None:
    config = changed("sync.exempt", (pattern,))
    with pytest.raises(UserError, match=f"config.sync.exempt: {message}"):
        sync.build(config.sync, PATHS, 10)
    sync.build(changed("sync.exempt", ("head/*",)).sync, PATHS, 10)


LOCKED = """from configs import digits_resnet
def get_config():
    c = digits_resnet.get_config()
    """


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def get_config(:", "--config: .*config.py, line 1: invalid syntax"),
        ("x = 1", r"--config: the file has no function get_config\(\), so it is no config"),
        ("def get_config(): return None", r"--config: get_config\(\) returns nothing"),
        ("import no_such_module", "config.py, line 1: ModuleNotFoundError: No module named 'no_s"),
        ("def get_config(): return {}['a']", "config.py, line 1: KeyError: 'a'"),
        (LOCKED + "None.foo", "config.py, line 4: AttributeError: 'NoneType' object has no attr"),
        (LOCKED + "c.nosuch = 3", "config.py, line 4: the config has no field 'nosuch'.$"),
        (
            LOCKED + "c.optimizer.learning_rat = 3.0",
            "config.py, line 4: the config has no field 'learning_rat'. Did you mean \"learning_ra",
        ),
        (LOCKED + "c.seed = 'x'", "config.py, line 4: TypeError: Could not override field 'seed'"),
        (LOCKED + "int('x')", "config.py, line 4: ValueError: invalid literal for int"),
        (LOCKED + "raise ValueError('no size')", "^--config: no size$"),
        (LOCKED + "open('no.txt')", "config.py, line 4: FileNotFoundError: .*'no.txt'$"),
        (LOCKED + "raise RuntimeError('y' * 999)", "config.py, line 4: RuntimeError: y{200} ...$"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_files_that_are_no_config(source: str, message: str, tmp_path: Path) -> None:
    """What ml_collections raises for them becomes one line."""
    from ml_collections.config_flags import config_flags

    path = tmp_path / "config.py"
    path.write_text(source + "\n")
    values = main.flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, flag_values=values)
    with pytest.raises(Exception) as caught:  # noqa: B017  (ml_collections raises many kinds)
        values(["train", f"--config={path}"])
        check.fields(values.config)
    error = caught.value
    if isinstance(error, flags.Error):
        line = mistakes.mistake_in_traceback(str(error))
    else:
        line = str(error) if isinstance(error, UserError) else mistakes.mistake_in(error)
    if "return None" in source:
        message = "returns NoneType, not a ml_collections.ConfigDict|" + message
    assert re.search(message, line), line
    assert "\n" not in line
