"""How parameters are made of matrices, and how these are split, as `orthogonalize` records it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcomm import _axes, _paths
from jaxcomm.transforms._layout import STACKED
from jaxcomm.transforms._options import fits
from jaxcomm.transforms._specs import axes_in, names_in, spec_of


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A parameter that is a matrix, or many of one shape.

    Attributes:
      path: its path in the tree.
      shape: its global shape.
      spec: how it is sharded.
      inputs: which of its axes are inputs; one that is split comes first.
      outputs: which are outputs, likewise. Its other axes count matrices.
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

    def stack(self, block: jax.Array) -> jax.Array:
        """A device's part of the parameter as matrices, `(b, inputs, outputs)`.

        Rows and columns are in an order of their own: orthogonal matrices do not depend on it.
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


def matrices_of(params: Any, dimension_numbers: Any) -> Matrices:
    """Reads off parameters how they are made of matrices.

    Args:
      params: the parameters, in the global view.
      dimension_numbers: as for `orthogonalize`.

    Raises:
      TypeError: for dimension numbers of another kind.
      ValueError: for a parameter of which nothing is said; as `_matrix`.
    """
    if callable(dimension_numbers):
        dimension_numbers = dimension_numbers(params)
    named = [(_paths.path_name(p), x) for p, x in jax.tree_util.tree_leaves_with_path(params)]
    said = None if dimension_numbers is None else _by_path(dimension_numbers, named)
    known = []
    for path, leaf in named:
        shape = tuple(jnp.shape(leaf))
        if 0 in shape:
            continue
        if said is not None and said[path] is None:
            continue
        rank = len(shape)
        inputs, outputs = _usual(path, shape) if said is None else _axes_of(said[path], path, rank)
        known.append(_matrix(leaf, path, inputs, outputs))
    return Matrices(tuple((path, tuple(jnp.shape(leaf))) for path, leaf in named), tuple(known))


def _usual(path: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of inputs and of outputs of a matrix, or of a stack that is known as one."""
    if len(shape) != 2 + fits(path, STACKED.get(())):
        raise ValueError(
            f"parameter {path} of shape {shape} is not a matrix; say what its axes are: "
            "weight_dimension_numbers={...: optax.contrib.MuonDimensionNumbers((1,), (2,)) "
            "or None, ...}, None for what is not made orthogonal. A stack of matrices is "
            f"also known by jaxcomm.with_layer_axis(tx, [{path!r}])."
        )
    return (len(shape) - 2,), (len(shape) - 1,)


def _by_path(dimension_numbers: Any, named: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """What is said of each parameter; one for all, or a pytree like the parameters."""
    if _is_said(dimension_numbers):
        return {path: dimension_numbers for path, _ in named}
    leaves = jax.tree_util.tree_leaves_with_path(
        dimension_numbers, is_leaf=lambda x: x is None or _is_said(x)
    )
    said = {_paths.path_name(path): x for path, x in leaves}
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
    both = [(axes,) if isinstance(axes, int) else tuple(axes) for axes in given]
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
    for axis in split:
        if shape[axis] % math.prod(mesh.shape[name] for name in over[axis]):
            raise ValueError(
                f"parameter {path} of shape {shape} does not divide evenly by {spec}; pad it."
            )

    def first(axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(axes, key=lambda axis: axis not in split))

    if not split:
        return Matrix(path, shape, spec, inputs, outputs)
    side = 1 if split[0] in inputs else 2
    return Matrix(path, shape, spec, first(inputs), first(outputs), over[split[0]], side)


def are_split(matrix: Matrix) -> bool:
    """Whether a device has only a part of the parameter, or its type says so."""
    return bool(names_in(matrix.spec))
