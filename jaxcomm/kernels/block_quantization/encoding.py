"""Messages in blocks, encoded by the plain version or in Mosaic."""

from typing import Any

import jax

from jaxcomm.kernels import _implementations
from jaxcomm.kernels.block_quantization import plain


def encode(
    x: jax.Array,
    writing: plain.Writing,
    key: jax.Array | None,
    static: tuple[Any, ...],
    implementation: _implementations.Option,
) -> jax.Array:
    """Encodes checked arguments; see `integers.encode` and `fp8.encode`.

    `static` holds the options that the writing was made of.
    """

    def run(name: str, x: jax.Array, key: jax.Array | None) -> jax.Array:
        if name == "mosaic":
            from jaxcomm.kernels.block_quantization import mosaic  # Pallas takes long to import

            return mosaic.encode(x, writing, key)
        return plain.encode(x, writing, key)

    elements, operation = writing.elements(x), writing.operation
    return _implementations.call(
        operation, implementation, run, (x, key), elements=elements, static=static
    )
