"""Muon for parameters that are split: each device makes its share of whole matrices orthogonal."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axes, codecs
from jaxcomm._cached_programs import refuse_cached_programs
from jaxcomm._notes import Message, noted
from jaxcomm._numbers import is_integer, is_real
from jaxcomm._pieces import cut
from jaxcomm.collectives._sending import all_to_all
from jaxcomm.transforms._chains import optax_callers
from jaxcomm.transforms._layout import are_other_names
from jaxcomm.transforms._matrices import Matrices, Matrix, matrices_of, name_of
from jaxcomm.transforms._specs import names_in
from jaxcomm.transforms._states import require_kind

Arrays = list[jax.Array]
# What of optax calls its inner transformation in a conditional.
_CONDITIONALS = {"apply_if_finite", "MultiSteps", "conditionally_mask", "conditionally_transform"}


class OrthogonalizeState(NamedTuple):
    """The state of `orthogonalize`: no arrays, only what `init` recorded about the parameters.

    Attributes:
      matrices: for each parameter how it is made of matrices, and how it is split.
    """

    matrices: Matrices


def orthogonalize(
    weight_dimension_numbers: Any = None,
    *,
    consistent_rms: Any = None,
    codec: str | codecs.Codec = "float32",
    ns_coeffs: Any = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    eps: Any = 1e-8,
    preconditioning: str = "frobenius",
) -> optax.GradientTransformation:
    """Makes matrices orthogonal, as Muon does with momenta, where parameters are split (FSDP).

    `optax.contrib.muon` needs whole matrices, and XLA sends those that are split several times in
    every step. Here a device sends its parts of a matrix once, to the one device that makes this
    matrix orthogonal, and gets them back. Matrices of one shape are dealt out to the devices, so
    each computes 1/N of the step. The momentum before it, `optax.trace`, stays split like the
    parameters.

    Call `init` on parameters that are placed, and `update` on what comes from the exchange, both
    outside `jax.shard_map`: inside, each device has only its part, and with check_vma=False nothing
    shows it. Matrices that are whole on every device, or in stacks that are split between matrices,
    are made orthogonal where they are, and nothing is sent.

    Args:
      weight_dimension_numbers: as for `optax.contrib.scale_by_muon`: which axes of a parameter are
        inputs and which are outputs; its other axes count matrices. A pytree like the parameters of
        `optax.contrib.MuonDimensionNumbers`, or a function from the parameters to it. Leaves for
        which it has None are passed on unchanged. None for all: every leaf is a matrix, or a stack
        of them that `jaxcomm.with_layer_axis` names.
      consistent_rms: as for `optax.contrib.muon`: with a number, updates are scaled by it and by
        sqrt(max(inputs, outputs)); None scales them by sqrt(max(1, outputs / inputs)).
      codec: the format in which parts are sent, both ways: "float32", "bfloat16" or another one
        that rounds to nearest, needs no error feedback and has the range of float32. A part of each
        matrix is a message of its own, with its own scales.
      ns_coeffs: as for `optax.contrib.scale_by_muon`, which computes the steps: the coefficients.
      ns_steps: likewise: how many steps.
      eps: likewise: what is added to the norm that a matrix is divided by.
      preconditioning: likewise: by what a matrix is divided first.

    Returns:
      A transformation whose updates have the shapes and shardings of the parameters.

    Raises:
      TypeError: immediately for other arguments; by `init` for dtypes that gradients do not have.
      ValueError: immediately for a codec that is random, needs feedback or has a smaller range; by
        `init` for a parameter of other than two axes about which nothing is said, one that is split
        along two of the axes of a matrix, and one whose sharding cannot be seen here; by `update`
        for updates of other parameters, or that are sharded otherwise.

    Wire: for G matrices of n values, split over N devices along the same side, twice (N-1) messages
    of ceil(G/N) parts of n / N values in the format of `codec`: in float32 8 (N-1)/N^2 bytes a
    value where N divides G.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm, optax
      >>> muon = optax.chain(
      ...     optax.trace(0.95, nesterov=True),
      ...     jaxcomm.orthogonalize(codec="bfloat16"),
      ...     optax.scale_by_learning_rate(2e-2),
      ... )
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     w = jaxcomm.shard(jnp.eye(4), "data")
      ...     update, _ = jax.jit(muon.update)(w, muon.init(w))
      >>> update.sharding.spec, bool(jnp.all(jnp.diag(update) < -0.01))
      (P(None, 'data'), True)

    References:
      K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
      https://kellerjordan.github.io/posts/muon.
      J. Liu et al., "Muon is Scalable for LLM Training", 2025, arXiv:2502.16982 (split momenta).

    Differs from the papers: theirs gathers each matrix on every device that has a part of it. The
    momentum is not corrected for its start from zero, which only changes the relative weight of the
    newest gradient in the first steps.
    """
    is_array = isinstance(consistent_rms, jax.Array) and consistent_rms.ndim == 0  # injected
    is_positive = is_real(consistent_rms) and consistent_rms > 0
    if not (consistent_rms is None or is_array or is_positive):
        raise ValueError(f"consistent_rms must be None or positive, got {consistent_rms!r}.")
    if not is_integer(ns_steps) or ns_steps < 1:
        raise ValueError(
            f"ns_steps must be a whole number of at least 1, got {ns_steps!r}; with "
            'optax.inject_hyperparams name it in static_args=("ns_steps",).'
        )
    chosen = codecs.from_name(codec)
    if chosen.is_random or chosen.needs_error_feedback or chosen.largest is not None:
        raise ValueError(
            f"matrices cannot be sent in {chosen.name}, which rounds at random, needs error "
            'feedback or has a smaller range; use "float32", "bfloat16" or "int8".'
        )
    further: dict[str, Any] = {}  # optax 0.2.5 does not have it
    if preconditioning != "frobenius":
        further["preconditioning"] = preconditioning
    rule = optax.contrib.scale_by_muon(
        ns_coeffs, ns_steps, beta=0.0, eps=eps, nesterov=False, **further
    )

    def orthogonal(x: jax.Array) -> jax.Array:
        step: Any = lambda m: rule.update(m, rule.init(m))[0]  # noqa: E731
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as optax
            return jax.vmap(step)(x)

    jax.eval_shape(orthogonal, jax.ShapeDtypeStruct((1, 2, 2), jnp.float32))  # for optax's errors

    def init_fn(params: Any) -> Any:
        return OrthogonalizeState(matrices_of(params, weight_dimension_numbers))

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        require_kind(state, OrthogonalizeState)
        known, (named, treedef) = state.matrices.known, jax.tree.flatten_with_path(updates)
        by_path = _checked(named, state.matrices)
        if any(m.axes for m in known) and optax_callers() & _CONDITIONALS:
            refuse_cached_programs("jaxcomm.orthogonalize exchanges in a conditional of optax")
        done = _Step(orthogonal, chosen)(known, [by_path[m.path] for m in known])
        for m, x in zip(known, done, strict=True):
            factor = _factor(m, consistent_rms)
            by_path[m.path] = (factor * x).astype(by_path[m.path].dtype)
        return treedef.unflatten(by_path.values()), state

    return optax.GradientTransformation(init_fn, update_fn)


def _checked(updates: Sequence[tuple[Any, Any]], matrices: Matrices) -> dict[str, jax.Array]:
    """The updates, by the paths of their parameters.

    Raises:
      ValueError: unless these are updates of the parameters that `init` saw, and where they were.
    """
    if len(updates) != len(matrices.shapes):
        raise ValueError(
            f"the state was made for {len(matrices.shapes)} parameters and got {len(updates)} "
            "updates; put orthogonalize after the exchange, and call tx.init on the parameters "
            "that are updated."
        )
    for (keys, x), (path, shape) in zip(updates, matrices.shapes, strict=True):
        if are_other_names(name := name_of(keys), path):
            raise ValueError(
                f"the state was made for a parameter {path!r} where this update is of {name!r}; "
                "call tx.init again, on these parameters."
            )
        if jnp.shape(x) != shape:
            raise ValueError(
                f"the update of {path} has shape {jnp.shape(x)}, expected {shape}; put "
                "orthogonalize after the exchange, and call tx.update outside jax.shard_map."
            )
    pairs = zip(updates, matrices.shapes, strict=True)
    by_path = {path: x for (_, x), (path, _) in pairs}
    for m in matrices.known:
        m.require_place(by_path[m.path])
    return by_path


def _factor(m: Matrix, rms: Any) -> Any:
    """What updates of a parameter are multiplied by, as in `optax.contrib.muon`."""
    inputs, outputs = m.sides
    if rms is None:
        return math.sqrt(max(1, outputs / inputs))
    return rms * math.sqrt(max(inputs, outputs))


@dataclasses.dataclass(frozen=True)
class _Step:
    """Makes matrices orthogonal, wherever their parts are.

    Attributes:
      orthogonal: from float `(b, inputs, outputs)` to the same, each matrix by itself.
      codec: the format of messages.
    """

    orthogonal: Callable[[jax.Array], jax.Array]
    codec: codecs.Codec

    def __call__(self, matrices: Sequence[Matrix], updates: Arrays) -> Arrays:
        """The orthogonal updates of these parameters, in the global view."""
        if not any(names_in(m.spec) for m in matrices):
            return self._over((), matrices, updates)
        specs = [m.spec for m in matrices]

        def on_device(blocks: Arrays) -> Arrays:
            by_axes: dict[tuple[str, ...], list[int]] = {}
            for i, m in enumerate(matrices):
                by_axes.setdefault(m.axes, []).append(i)
            found: dict[int, jax.Array] = {}
            for axes, own in by_axes.items():
                done = self._over(axes, [matrices[i] for i in own], [blocks[i] for i in own])
                found |= dict(zip(own, done, strict=True))
            return [found[i] for i in range(len(blocks))]

        return _axes.region(on_device, (specs,), specs)(updates)

    def _over(self, axes: tuple[str, ...], matrices: Sequence[Matrix], blocks: Arrays) -> Arrays:
        """The same for a device's parts of parameters whose matrices are split over these axes.

        Matrices of one shape are one stack. Each device makes an equal share of it orthogonal.
        """
        stacks = [m.stack(block) for m, block in zip(matrices, blocks, strict=True)]
        alike: dict[Any, list[int]] = {}
        for i, (m, x) in enumerate(zip(matrices, stacks, strict=True)):
            alike.setdefault((m.split, *x.shape[1:], x.dtype), []).append(i)
        joined = [jnp.concatenate([stacks[i] for i in group]) for group in alike.values()]
        if axes:
            exchange = _Exchange(axes, [split for split, *_ in alike], self.codec)
            paths = tuple(m.path for m in matrices)
            with noted(Message("matrices", paths)), noted(f"{self.codec.name}, whole matrices"):
                done = [self.orthogonal(x) for x in exchange.whole(joined)]
                done = exchange.parts(done, [len(x) for x in joined])
        else:
            done = [self.orthogonal(x) for x in joined]
        found: dict[int, jax.Array] = {}
        for group, x in zip(alike.values(), done, strict=True):
            found |= dict(zip(group, cut(x, [len(stacks[i]) for i in group]), strict=True))
        return [m.unstack(found[i], blocks[i].shape) for i, m in enumerate(matrices)]


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """Between parts of all matrices and a share of whole ones; each stack is `(G, rows, columns)`.

    Attributes:
      axes: the mesh axes over which the matrices are split.
      splits: for each stack the axis that is split: 1 or 2.
      codec: the format of messages.
    """

    axes: tuple[str, ...]
    splits: Sequence[int]
    codec: codecs.Codec

    def whole(self, stacks: Arrays) -> Arrays:
        """This device's ceil(G/N) matrices of each stack of parts; zeros if there are fewer."""
        world = _axes.axis_size(self.axes)
        padded = [jnp.pad(x, ((0, -len(x) % world), (0, 0), (0, 0))) for x in stacks]
        arrived = self._sent([x.reshape(world, -1, *x.shape[1:]) for x in padded])
        pairs = zip(arrived, self.splits, strict=True)
        return [_merged(jnp.moveaxis(x, 0, split), split) for x, split in pairs]

    def parts(self, stacks: Arrays, sizes: Sequence[int]) -> Arrays:
        """This device's parts of all matrices, as many as given, from its share of whole ones."""
        world = _axes.axis_size(self.axes)
        rows = []
        for x, split in zip(stacks, self.splits, strict=True):
            cut_up = x.reshape(*x.shape[:split], world, -1, *x.shape[split + 1 :])
            rows.append(jnp.moveaxis(cut_up, split, 0))
        arrived = self._sent(rows)
        return [_merged(x, 0)[:size] for x, size in zip(arrived, sizes, strict=True)]

    def _sent(self, rows: Arrays) -> Arrays:
        """Row i of device r becomes row r of device i, `(N, b, rows, columns)` each.

        The part of each matrix has its own scales, and all are one message.
        """
        world = len(rows[0])
        parts = [x.astype(jnp.float32).reshape(*x.shape[:2], -1) for x in rows]
        payloads = [self.codec.encode(x) for x in parts]
        arrived = all_to_all(
            jnp.concatenate([x.reshape(world, -1) for x in payloads], 1), self.axes
        )
        stops = list(itertools.accumulate(x.size // world for x in payloads))
        found = []
        for x, part, sent, payload in zip(
            rows, parts, jnp.split(arrived, stops[:-1], axis=1), payloads, strict=True
        ):
            values = self.codec.decode(sent.reshape(payload.shape), part.shape[-1])
            found.append(values.reshape(x.shape).astype(x.dtype))
        return found


def _merged(x: jax.Array, axis: int) -> jax.Array:
    """The array with this axis and the next one as one."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
