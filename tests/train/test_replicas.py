"""A bit that flips on one device is found, and named."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jaxcomm
from train.errors import RunError
from train.replicas import hashes, make_check


def parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"a": rng.normal(size=(3, 5)).astype(np.float32), "b": np.zeros(70, np.float32)}


def placed(changed: dict[int, dict[str, np.ndarray]]) -> dict[str, jax.Array]:
    """Said to be equal on all devices; some hold others."""
    mesh = jax.sharding.get_mesh()
    sharding = NamedSharding(mesh, jax.P())
    return {
        name: jax.make_array_from_single_device_arrays(
            value.shape,
            sharding,
            [
                jax.device_put(changed.get(i, {}).get(name, value), d)
                for i, d in enumerate(mesh.devices.flat)
            ],
        )
        for name, value in parameters().items()
    }


def flipped(value: np.ndarray, index: int, bit: int) -> np.ndarray:
    words = value.copy().reshape(-1).view(np.uint32)
    words[index] ^= np.uint32(1 << bit)
    return words.view(np.float32).reshape(value.shape)


def test_one_bit_on_some_devices() -> None:
    good = parameters()
    with jax.set_mesh(jaxcomm.data_mesh()):
        check = make_check(placed({}), "mean")
        check(placed({}), 7)
        for index, bit in ((0, 0), (69, 31), (33, 17)):
            with pytest.raises(RunError) as caught:
                check(placed({5: {"b": flipped(good["b"], index, bit)}}), 7)
            assert "after step 7, the parameters of device 5 (process 0)" in str(caught.value)
            assert "b is the first of 1" in str(caught.value) and caught.value.status == 1
            assert str(caught.value).endswith("and check that machine and its checkout")
        both = {"a": flipped(good["a"], 3, 1), "b": flipped(good["b"], 3, 1)}
        message = re.escape("device 2 (process 0), 6 (process 0) differ from")
        with pytest.raises(RunError, match=f"{message}.*: a is the first of 2 that differ"):
            check(placed({2: both, 6: {"b": both["b"]}}), 7)


def test_one_bit_of_what_is_split_within_groups() -> None:
    """Device 5 of (4, 2) holds the second half of each array, as devices 1, 3 and 7 do."""
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), (jax.sharding.AxisType.Auto,) * 2)
    halves = np.arange(12, dtype=np.float32).reshape(2, 6)

    def split(changed: int | None) -> dict[str, jax.Array]:
        rows = [
            flipped(halves[i % 2], 2, 9) if i == changed else halves[i % 2]
            for i in range(mesh.size)
        ]
        pairs = zip(rows, mesh.devices.flat, strict=True)
        arrays = [jax.device_put(row, device) for row, device in pairs]
        sharding = NamedSharding(mesh, jax.P("fsdp"))
        return {"w": jax.make_array_from_single_device_arrays((12,), sharding, arrays)}

    with jax.set_mesh(mesh):
        check = make_check(split(None), "mean")
        check(split(None), 7)
        with pytest.raises(RunError, match="of device 5 .* differ from .*: w is the first of 1"):
            check(split(5), 7)


def test_hashes_notice_the_order_and_the_sign_of_zero() -> None:
    x = jnp.arange(1000.0)
    assert (hashes([x]) == hashes([x + 0])).all()
    for other in (x[::-1], x.at[0].set(-0.0), jnp.roll(x, 1), x.astype(jnp.float32).at[7].add(1)):
        assert (hashes([x]) != hashes([other])).all()
    assert hashes([x.astype(jnp.bfloat16)]).shape == (1, 2)


def test_several_changes_cancel_by_chance_alone() -> None:
    """A parameter that is zero and steps by a vote differs in signs alone."""
    x = np.random.default_rng(0).normal(size=2048).astype(np.float32)
    others = [-x, x.copy()]
    others[1][[3, 7]] = 0.006, -0.006
    swapped = others[1].copy()
    swapped[[3, 7]] = swapped[[7, 3]]
    for count in range(1, 9):
        others.append(x.copy())
        others[-1][5 : 5 + 100 * count : 100] *= -1
    for other in others:
        assert (hashes([jnp.asarray(x)]) != hashes([jnp.asarray(other)])).all()
    assert (hashes([jnp.asarray(others[1])]) != hashes([jnp.asarray(swapped)])).all()
