"""States of transformations, from parameters of which only the shapes may be known."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def shapes_of(init: Callable[[Any], Any], params: Any) -> Any:
    """`jax.eval_shape(init, params)`, where parameters keep the shardings that `init` reads."""
    given = jax.tree.map(lambda x: _Shape.of(x) if type(x) is jax.ShapeDtypeStruct else x, params)
    return jax.eval_shape(lambda: init(given))


class _Shape(jax.ShapeDtypeStruct):
    """A shape that is zeros where an optimizer makes an array of it, for its dtype or a copy."""

    __slots__ = ()

    @classmethod
    def of(cls, x: jax.ShapeDtypeStruct) -> "_Shape":
        """The same shape."""
        return cls(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)

    def __jax_array__(self) -> jax.Array:
        """The zeros."""
        return jnp.zeros(self.shape, self.dtype)

    def __getattr__(self, name: str) -> Any:
        """Attributes that only arrays have, such as `copy`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)
