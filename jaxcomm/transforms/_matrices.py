"""How parameters are made of matrices, and how these are split, as `orthogonalize` records it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcomm import _axes, _paths
from jaxcomm._numbers import is_integer
from jaxcomm.transforms._layout import STACKED, is_vector
from jaxcomm.transforms._options import fits
from jaxcomm.transforms._specs import axes_in, names_in, restrict, spec_of


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A parameter that is a matrix, or many of one shape.

    Attributes:
      path: its path in the tree.
      shape: its global shape.
      spec: how it is sharded.
      inputs: which of its axes are inputs.
      outputs: which are outputs. Its other axes count matrices.
      axes: the mesh axes of several devices over which each matrix is split; empty if none is.
      split: what they split of a stack of matrices: 1 for inputs, 2 for outputs; 0 for whole ones.
    """

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axes: tuple[str, ...] = ()
    split: int = 0

    @property
    def order(self) -> tuple[int, ...]:
        """The axes: those that count matrices, inputs, outputs."""
        own = self.inputs + self.outputs
        return tuple(i for i in range(len(self.shape)) if i not in own) + own

    @property
    def sides(self) -> tuple[int, int]:
        """The numbers of inputs and outputs."""
        inputs = math.prod(self.shape[axis] for axis in self.inputs)
        return inputs, math.prod(self.shape[axis] for axis in self.outputs)

    def require_place(self, x: jax.Array) -> None:
        """Raises a ValueError unless an update can be, and by its type is, sharded as recorded."""
        if not names_in(self.spec) and not _axes.explicit_axes():
            return
        mesh, explicit = _axes.current_mesh(), _axes.explicit_axes()
        cure = "call tx.init again, on the parameters as they are placed now"
        for axis in names_in(self.spec):
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"parameter {self.path} was split over {axis!r}, and the mesh has "
                    f"the axes {', '.join(map(repr, mesh.axis_names))}; {cure}, or set its mesh."
                )
            if axis in _axes.manual_axes():
                raise ValueError(
                    f"parameter {self.path} is split over {axis!r}, and inside a "
                    "jax.shard_map over it only a part is here; call tx.update outside of it."
                )
        for n, names in zip(self.shape, axes_in(self.spec, len(self.shape)), strict=True):
            if n % math.prod(mesh.shape[name] for name in names):
                raise ValueError(
                    f"parameter {self.path} of shape {self.shape} cannot be split by "
                    f"{self.spec} on this mesh; {cure}."
                )
        found = restrict(jax.typeof(x).sharding.spec, explicit)
        if found != restrict(self.spec, explicit):
            raise ValueError(
                f"the update of {self.path} is sharded by {found}, and its parameter was "
                f"by {self.spec}; {cure}."
            )

    def stack(self, block: jax.Array) -> jax.Array:
        """A device's part of the parameter as matrices, `(b, inputs, outputs)`.

        Parts of devices make up a matrix whose rows and columns are in an order of their own. A
        step of Muon does not depend on it.
        """
        x = block.transpose(self.order)
        rows = math.prod(block.shape[axis] for axis in self.inputs)
        columns = math.prod(block.shape[axis] for axis in self.outputs)
        return x.reshape(-1, rows, columns)

    def unstack(self, x: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The part of this shape of which x is the stack."""
        x = x.reshape([shape[axis] for axis in self.order])
        return x.transpose(sorted(range(x.ndim), key=self.order.__getitem__))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Matrices:
    """All parameters.

    Attributes:
      shapes: the global shape of each, by path.
      known: the matrices among them, by path.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    known: tuple[Matrix, ...]


def name_of(keys: Any) -> str:
    """What to call a parameter: its path, or "tree" where it is all of them."""
    return _paths.path_name(keys) or "tree"


def matrices_of(params: Any, dimension_numbers: Any) -> Matrices:
    """Reads off parameters how they are made of matrices.

    Args:
      params: the parameters, in the global view.
      dimension_numbers: as for `orthogonalize`.

    Raises:
      TypeError: for dimension numbers of another kind, and for dtypes that gradients do not have.
      ValueError: for a parameter of which nothing is said; as `_matrix`.
    """
    if type(params).__name__ == "_ParamsPlaceholder":  # of optax; it is not public
        raise ValueError(
            "optax.tree.map_params makes a state without parameters, but that of orthogonalize "
            "has their shapes, and no arrays: map over the states of the others in the chain, such "
            "as that of the momentum."
        )
    if callable(dimension_numbers):
        dimension_numbers = dimension_numbers(params)
    named = [(name_of(keys), x) for keys, x in jax.tree_util.tree_leaves_with_path(params)]
    _paths.require_distinct([path for path, _ in named])
    said = None if dimension_numbers is None else _by_path(dimension_numbers, named)
    known = []
    for path, leaf in named:
        shape = tuple(jnp.shape(leaf))
        if 0 in shape:
            continue
        if said is not None and said[path] is None:
            continue
        _paths.require_float(path, jnp.result_type(leaf))
        rank = len(shape)
        inputs, outputs = _usual(path, shape) if said is None else _axes_of(said[path], path, rank)
        known.append(_matrix(leaf, path, inputs, outputs))
    return Matrices(tuple((path, tuple(jnp.shape(leaf))) for path, leaf in named), tuple(known))


def _usual(path: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of inputs and of outputs of a matrix, or of a stack that is known as one."""
    stacked = fits(path, STACKED.get(()))
    if len(shape) != 2 + stacked or is_vector(path, shape, stacked):
        stack = f" A stack is known by jaxcomm.with_layer_axis(tx, [{path!r}])."
        raise ValueError(
            f"parameter {path} of shape {shape} is not a matrix; say what its axes are: "
            "weight_dimension_numbers={...: optax.contrib.MuonDimensionNumbers((1,), (2,)) "
            "or None, ...}, None for what is not made orthogonal."
            f"{stack if len(shape) == 3 and not stacked else ''}"
        )
    return (len(shape) - 2,), (len(shape) - 1,)


def _by_path(dimension_numbers: Any, named: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """What is said of each parameter; one for all, or a pytree like the parameters."""
    if _is_said(dimension_numbers):
        return {path: dimension_numbers for path, _ in named}
    leaves = jax.tree_util.tree_leaves_with_path(
        dimension_numbers, is_leaf=lambda x: x is None or _is_said(x)
    )
    said = {name_of(keys): x for keys, x in leaves}
    for path, _ in named:
        if path not in said or not (said[path] is None or _is_said(said[path])):
            raise TypeError(
                f"weight_dimension_numbers needs optax.contrib.MuonDimensionNumbers or None for "
                f"{path}, got {said.get(path, 'nothing')!r}; it is a pytree like the parameters."
            )
    return said


def _is_said(x: Any) -> bool:
    return hasattr(x, "reduction_axis") and hasattr(x, "output_axis")


def _axes_of(numbers: Any, path: str, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of inputs and of outputs, counted from 0."""
    given = (numbers.reduction_axis, numbers.output_axis)
    both = [(axes,) if is_integer(axes) else tuple(axes) for axes in given]
    flat = [axis % rank if -rank <= axis < rank else None for axes in both for axis in axes]
    if not all(both) or None in flat or len(set(flat)) < len(flat):
        raise ValueError(
            f"{numbers} does not fit parameter {path} of {rank} axes: it needs at least one input "
            "and one output axis, and each once."
        )
    inputs, outputs = (tuple(axis % rank for axis in axes) for axes in both)
    return inputs, outputs


def _matrix(leaf: Any, path: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Matrix:
    """What is recorded of a parameter.

    Raises:
      ValueError: if each of its matrices is split along two axes, or its sharding is not visible.
    """
    shape, sharding = tuple(jnp.shape(leaf)), getattr(leaf, "sharding", None)
    if jax.sharding.get_abstract_mesh().empty and getattr(sharding, "is_fully_replicated", True):
        return Matrix(path, shape, PartitionSpec(), inputs, outputs)
    spec, mesh = spec_of(leaf, path, None), _axes.current_mesh()
    if inside := sorted(axis for axis in _axes.varying_axes(leaf) if mesh.shape[axis] > 1):
        raise ValueError(
            f"parameter {path} differs along {', '.join(map(repr, inside))} inside this "
            "jax.shard_map: it may be a part of matrices; call tx.init outside, on placed "
            "parameters."
        )
    over = [
        tuple(name for name in names if mesh.shape[name] > 1) for names in axes_in(spec, len(shape))
    ]
    split = [axis for axis in inputs + outputs if over[axis]]
    if len(split) > 1:
        raise ValueError(
            f"parameter {path} of shape {shape} is split by {spec}, along two axes of a matrix; "
            "split one of them, over both mesh axes, or use optax.contrib.muon, for which XLA "
            "sends each matrix several times."
        )
    for n, names in zip(shape, over, strict=True):
        if n % math.prod(mesh.shape[name] for name in names):
            raise ValueError(
                f"parameter {path} of shape {shape} does not divide evenly by {spec}; pad it."
            )
    if not split:
        return Matrix(path, shape, spec, inputs, outputs)
    side = 1 if split[0] in inputs else 2
    return Matrix(path, shape, spec, inputs, outputs, over[split[0]], side)
