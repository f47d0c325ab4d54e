"""Which tokens are hidden, and by what: the same on any number of processes, and after a stop."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import config_dict
from running import read_config
from texts import InMemory

from train import check, data, step
from train.errors import UserError
from train.masked_text import MASK, MaskedText, mask

LENGTH = 20  # Of which three are hidden.


@pytest.fixture
def settings(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    with config.unlocked():
        config.data.update({"name": "a text", "sequence_length": LENGTH, "masked": 0.15})
    return config.data


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = InMemory(train=250, test=107)
    monkeypatch.setattr(data, "open_builder", lambda config: texts)


def drawn(rows: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Masked rows, and what they were."""
    tokens = np.random.default_rng(99).integers(0, 256, (rows, LENGTH))
    batch = {"image": tokens.astype(np.uint16), "weight": np.ones(tokens.shape, np.float32)}
    mask(batch, np.random.default_rng(seed), 0.15)
    return batch, tokens


def test_a_row_hides_as_many_as_the_others_and_mostly_by_the_mask() -> None:
    batch, tokens = drawn(20_000)
    hidden = batch["weight"] == 1
    assert (hidden.sum(axis=1) == 3).all() and (batch["weight"][~hidden] == 0).all()
    assert (batch["image"][~hidden] == tokens[~hidden]).all()
    seen, were = batch["image"][hidden], tokens[hidden]
    # 60,000 draws: the tolerances are five standard deviations. A byte drawn is right by chance.
    assert abs((seen == MASK).mean() - 0.8) < 0.009
    assert abs((seen == were).mean() - (0.1 + 0.1 / 256)) < 0.007
    assert np.unique(seen[(seen != MASK) & (seen != were)]).size == 256
    assert abs(hidden.mean(axis=0) - 0.15).max() < 0.015  # Every place is as likely.
    again, other = drawn(20_000)[0], drawn(20_000, seed=1)[0]
    assert all((batch[name] == again[name]).all() for name in batch)
    assert (batch["weight"] != other["weight"]).any()


@pytest.mark.parametrize(("size", "hidden"), [(21, 4), (40, 6), (41, 7), (59, 9)])
def test_a_last_row_reaches_back_and_hides_only_what_no_other_has(
    size: int, hidden: int, settings: config_dict.ConfigDict
) -> None:
    text = MaskedText(InMemory(test=size), settings)
    rows = np.arange(text.test_rows("test"))
    read, test = text.read("test", rows), text.read_test("test", rows)
    assert sorted(read["label"][read["weight"] > 0]) == list(range(size))
    assert (read["image"] == read["label"]).all() and (test["label"] == read["label"]).all()
    assert (test["weight"] <= read["weight"]).all() and test["weight"].sum() == hidden
    assert text.test_size("test") == hidden and text.train_rows("test") == size // LENGTH
    # Row by row, as another number of processes reads them.
    for row in rows:
        alone = text.read_test("test", rows[row : row + 1])
        assert all((alone[name][0] == test[name][row]).all() for name in test)


@pytest.mark.parametrize(("world", "batch_size"), [(1, 4), (4, 8), (5, 5)])
def test_a_test_hides_the_same_tokens_on_any_number_of_processes(
    in_memory: None, settings: config_dict.ConfigDict, world: int, batch_size: int
) -> None:
    loaded = [data.load(settings, batch_size, [i], world, seed=world) for i in range(world)]
    seen = [b["label"][b["weight"] > 0] for process in loaded for b in process.test]
    text = MaskedText(InMemory(test=107), settings)
    expected = text.read_test("test", np.arange(6))
    assert sorted(np.concatenate(seen)) == sorted(expected["label"][expected["weight"] > 0])
    first = loaded[0]
    assert (first.classes, first.unit, first.test_size) == (257, "tokens", 16)
    assert first.names == ("image", "label", "weight")


def test_what_a_batch_hides_depends_on_seed_device_and_position_alone(
    in_memory: None, settings: config_dict.ConfigDict
) -> None:
    """Twelve rows on four devices: three batches of one row a device are an epoch."""
    together = data.load(settings, 4, [0, 1, 2, 3], 4, 0).train
    apart = [data.load(settings, 4, [i], 4, 0).train for i in range(4)]
    batches = [next(together) for _ in range(8)]
    for batch in batches[:5]:
        parts = [next(process) for process in apart]
        assert all((batch[k] == np.concatenate([p[k] for p in parts])).all() for k in batch)
    hidden = [batch["weight"].tobytes() for batch in batches]
    other = next(data.load(settings, 4, [0, 1, 2, 3], 4, 1).train)
    assert len({*hidden, other["weight"].tobytes()}) == 9
    assert (batches[0]["weight"][0] != batches[0]["weight"][1]).any()
    rows = np.concatenate([batch["label"][:, 0] for batch in batches[:6]]).reshape(2, 12)
    assert (np.sort(rows) == LENGTH * np.arange(12)).all()
    resumed = data.load(settings, 4, [2], 4, 0).train
    resumed.set_state(apart[2].get_state())
    found = next(resumed)
    assert all((found[name] == batches[5][name][2:3]).all() for name in found)


def test_only_hidden_tokens_count() -> None:
    """Loss and accuracy of a batch, by numpy."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 5, 4)).astype(np.float32)
    labels = rng.integers(0, 4, (2, 5))
    weight = np.zeros((2, 5), np.float32)
    weight[0, 1] = weight[1, 3] = 1
    loss_fn = step.make_loss(lambda params, inputs: params, 0.0)
    batch = {
        "image": jnp.zeros((2, 5)),
        "label": jnp.asarray(labels),
        "weight": jnp.asarray(weight),
    }
    loss, metrics = loss_fn(jnp.asarray(logits), batch)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    places = ((0, 1), (1, 3))
    expected = -np.mean([np.log(chances[i, j, labels[i, j]]) for i, j in places])
    right = [logits[i, j].argmax() == labels[i, j] for i, j in places]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(right))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("text_bert", {"data.masked": 0.0}, "bert sees the whole row, .* set --config.data.masked"),
        ("text_lstm", {"data.masked": 0.15}, "name=lstm does not predict them; .*data.masked=0$"),
        ("digits_vit", {"data.masked": 0.15}, "model.name=vit does not predict them"),
        ("text_bert", {"data.masked": 1.0}, "data.masked is 1.0; it must be a number from 0 to be"),
        ("text_bert", {"data.masked": -0.1}, "data.masked is -0.1; it must be a number from 0"),
    ],
)
def test_models_and_data_that_do_not_fit(name: str, fields: dict[str, Any], message: str) -> None:
    config = read_config(name)
    config.update_from_flattened_dict(fields)
    with pytest.raises(UserError, match=message):
        check.fields(config)
        check.fit(config, 4)


def test_sizes_of_bert() -> None:
    with pytest.raises(ValueError, match="there is no size 'huge'; it is one of tiny, mini"):
        read_config("text_bert", "huge")
    config = read_config("text_bert", "base")
    assert (config.model.depth, config.model.width, config.model.mlp_width) == (12, 768, 3072)
