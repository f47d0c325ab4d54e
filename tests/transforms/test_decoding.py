"""How often a step decodes what has arrived."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm


@pytest.mark.parametrize(("codec", "times"), [("cnat", 1), ("bfloat16", 2)])
def test_what_takes_long_to_decode_is_decoded_once_on_cpu(codec: str, times: int) -> None:
    mesh = jaxcomm.data_mesh(devices=jax.devices()[:2])
    tx = jaxcomm.mean("data", codec, "direct")

    def operands(uses: Any) -> int:
        """How often the compiled program reads what devices gathered."""

        def step(grads: jax.Array, state: Any) -> Any:
            updates, state = tx.update(grads, state)
            return state, [use(updates) for use in uses]

        compiled = jax.jit(step).lower(grads, tx.init(params)).compile().as_text()
        (payload,) = re.findall(r"(%\S+) = \S+ all-gather\(", compiled)
        return len(re.findall(rf"[(, ]{re.escape(payload)}[,)]", compiled))

    with jax.set_mesh(mesh):
        params = jnp.zeros((256, 256))
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        grads = jax.ShapeDtypeStruct((2, *params.shape), jnp.float32, sharding=sharding)
        one, two = operands([jnp.square]), operands([jnp.square, lambda x: 0.9 * x])  # as Adam has
    assert two - one == times - 1
