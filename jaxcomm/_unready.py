"""Parameters that have to go through a function of jaxcomm before anything computes with them."""

from typing import Any

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_REFUSED = ["__jax_array__", "__getitem__", "__neg__", "__abs__"]
_REFUSED += [f"__{name}__" for name in ("lt", "le", "gt", "ge")]
_REFUSED += [f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")]


class Unready:
    """Its operators, attributes and conversion to an array raise an error that names the cure."""

    __array_ufunc__ = None  # numpy's arrays leave their operators to it

    def _cure(self) -> str:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        # A copy is asked for its fields before it has any, and then cannot say what it is.
        if name.startswith("__") or name in type(self).__annotations__:
            raise AttributeError(name)
        raise AttributeError(f"{self._cure()} (Before that, it has no {name!r}.)")


def _refuse(self: Unready, *_: Any) -> Any:
    raise TypeError(self._cure())


for _name in _REFUSED:  # Python looks for operators in classes alone
    setattr(Unready, _name, _refuse)
