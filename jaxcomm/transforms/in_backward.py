"""The exchange of scanned layers inside the backward pass, as an optax transformation.

`jaxcomm._attached` says how a layer is exchanged where it is used. This module does the rest: it
keeps the states of all layers, exchanges the parameters outside the stacks as usual, and lets all
of them take the step, or none. Whether a step is finite is known only after the first layer, which
comes last in the backward pass. So `update` applies nothing before it has the flags of all layers,
and leaves all states as they were if one of them is not finite.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxcomm._attached import Arrays, Attached, Stack, from_floats, is_attached, to_floats
from jaxcomm._context import holding
from jaxcomm._marks import mark_local, unmark_local
from jaxcomm._notes import noted
from jaxcomm._shards import is_sharded
from jaxcomm.transforms import _roles
from jaxcomm.transforms._buckets import LAYER
from jaxcomm.transforms._layout import PATHS, STACKED, axis_of, leaf_paths
from jaxcomm.transforms._specs import GIVEN_SPECS
from jaxcomm.transforms._stacks import (
    first_layer,
    is_nan,
    is_parameter,
    kept,
    layers_in,
    none_of,
    of_one_layer,
    part_of,
    paths_of,
    places,
    specs_of,
    stacked,
)
from jaxcomm.transforms._states import require_kind
from jaxcomm.transforms._wrappers import refuse_wrappers, with_extra_args
from jaxcomm.transforms.per_device import is_own


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Stacks:
    """Which subtrees of the parameters are stacks, and of how many layers."""

    paths: tuple[str, ...]
    sizes: tuple[int, ...]


class InBackwardState(NamedTuple):
    """The state of `in_backward`.

    Attributes:
      stacks: which subtrees are exchanged in the backward pass.
      layers: for each of them the states of its layers; every array has a leading axis of layers.
      rest: the state of the exchange of all other parameters; empty if there are none.
    """

    stacks: Stacks
    layers: tuple[Any, ...]
    rest: Any

    @property
    def roles(self) -> frozenset[str]:
        """Those of the exchange, and that it is in the backward pass."""
        return _roles.roles_of((*self.layers, self.rest)) | {_roles.IN_BACKWARD}


class InBackward(optax.GradientTransformationExtraArgs):
    """What `in_backward` returns: an optax transformation with the method `attach`.

    It takes the place of an exchange in a chain. In each step, `attach` passes the state to the
    backward pass, which exchanges the layers. Then `update` collects their means, exchanges all
    other gradients, and joins both, or makes all updates NaN if one gradient is not finite.
    """

    _made: "_InBackward"

    def attach(self, params: Any, state: Any) -> Any:
        """The parameters together with the state of their exchange.

        Args:
          params: the parameters.
          state: the state of this transformation, or of a chain that contains it.

        Returns:
          The pytree of the parameters, for `jaxcomm.value_and_grad`. Its layers must go through
          `jaxcomm.exchanged` in the loss.

        Raises:
          ValueError: if the state belongs to another transformation, or to other parameters.

        Wire: nothing.
        """
        return self._made.attach(params, state)


def in_backward(exchange: optax.GradientTransformation, layers: Sequence[str]) -> InBackward:
    """Exchanges the gradients of scanned layers inside the backward pass, one layer at a time.

    The gradient of a stack of layers exists only after `jax.lax.scan` has gone through all of them,
    when no computation is left to hide its exchange. With this transformation, each layer is
    exchanged inside the loop, hidden by the backward pass of the layers before it. Name the stacks,
    pass each layer through `jaxcomm.exchanged` where it is used, and pass
    `exchange.attach(params, state)` to `jaxcomm.value_and_grad`, as in the example.

    Each layer is exchanged as if it were a whole model, so buckets do not span layers. All other
    parameters are exchanged by `update`, in the same way. Pass the exchange the `bucket_order` that
    `jaxcomm.backward_order` finds: within a layer it decides which products hide which bucket.
    Buckets are filled starting from a layer's last gradient, and the last bucket holds two thirds
    of `bucket_mib`. Ideally, a layer fits in three buckets, or in two if the method runs many
    kernels between its hops, as sparse means do.

    The new state of a layer leaves the backward pass as the gradient of the old one. So error
    feedback, momentum and thresholds work in `jax.lax.scan`, `nnx.scan`, `jax.checkpoint` and
    Python loops. `jaxcomm.accumulate` exchanges in the last microbatch only; if that one leaves out
    a layer that others used, the update is NaN. A layer whose gradient is zero takes part like any
    other. If no gradient reaches a layer at all, because the loss does not use it, it is not
    exchanged: its update is zero, and its state stays as it was.

    If any gradient on any device is not finite, every update on every device is NaN and the whole
    state stays as it was, counters included. Layers that were already exchanged are not applied
    either, because `update` comes after the whole backward pass. The same happens if a layer went
    through several calls of `jaxcomm.exchanged`, whose states cannot be added. Further arguments of
    `update`, such as `value`, reach only the exchange of the other parameters.

    Args:
      exchange: how gradients are exchanged: `jaxcomm.mean`, `jaxcomm.majority_vote` or another
        method, or a chain of `jaxcomm.local` and a method.
      layers: the paths of the stacks, such as ["blocks"] or ["encoder/blocks", "decoder/blocks"].
        All leaves below a path have a common leading axis of layers.

    Returns:
      A transformation used like `exchange`, with an additional method `attach(params, state)`. The
      pytree that `attach` returns has the leaves of the state in addition to the parameters. Every
      array of a stack's state has a leading axis of layers.

    Raises:
      TypeError: immediately if `layers` is not a list of paths.
      ValueError: by `init` for a path that names no stack, otherwise as for `exchange`; by
        `attach`, `jaxcomm.exchanged` and `update` if a parameter is exchanged twice, in part, or
        not at all.

    Wire: that of `exchange` for one layer, once for each layer, and that of `exchange` for all
    other parameters; with several microbatches, also an int32 for each layer.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> exchange = jaxcomm.in_backward(jaxcomm.mean("data", "bfloat16"), ["blocks"])
      >>> def loss_fn(params, x):
      ...     def block(x, layer):
      ...         return x @ jaxcomm.exchanged(layer)["w"], None
      ...     return jnp.mean(jax.lax.scan(block, x, params["blocks"])[0])
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     params = {"blocks": {"w": jnp.stack([jnp.eye(2)] * 3)}}
      ...     state = exchange.init(params)
      ...     f = jaxcomm.value_and_grad(loss_fn, "data")
      ...     loss, grads = jax.jit(f)(exchange.attach(params, state), jnp.eye(2))
      ...     updates, state = exchange.update(grads, state)
      >>> updates["blocks"]["w"][0]
      Array([[0.25, 0.25],
             [0.25, 0.25]], dtype=float32)

    References:
      Y. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023,
      arXiv:2304.11277 (gradients are reduced layer by layer, from hooks in the backward pass).
      P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433 (scales that
      change in the backward pass; Flax returns the new ones as gradients of the old ones).
    """
    is_list = isinstance(layers, Collection) and not isinstance(layers, str)
    if not is_list or not layers or not all(isinstance(x, str) for x in layers):
        raise TypeError(
            f'layers must be a list of paths of stacked layers, such as ["blocks"], got {layers!r}.'
        )
    made = _InBackward(with_extra_args(exchange, "in_backward", "exchange"), tuple(layers))
    result = InBackward(made.init, made.update)
    result._made = made
    return result


@dataclasses.dataclass(frozen=True)
class _InBackward:
    """The arguments of `in_backward`, and what it does with them."""

    exchange: optax.GradientTransformationExtraArgs
    layers: tuple[str, ...]
    known: dict[Any, Stack] = dataclasses.field(default_factory=dict, compare=False)

    def init(self, params: Any) -> Any:
        refuse_wrappers()
        with noted(self):  # `jaxcomm.explain` attaches the state
            of = places(paths_of(params), self.layers)
        sizes = layers_in(params, of, self.layers)
        states = tuple(self._init_stack(params, of, i, size) for i, size in enumerate(sizes))
        rest = self._init_part(params, [i is None for i in of]) if None in of else ()
        return InBackwardState(Stacks(self.layers, sizes), states, rest)

    def _init_stack(self, params: Any, of: Sequence[int | None], number: int, size: int) -> Any:
        """The states of a stack's layers, which all start alike."""
        leaves, treedef = jax.tree.flatten(params)
        paths, chosen = paths_of(params), [i == number for i in of]
        own = {path for path, is_chosen in zip(paths, chosen, strict=True) if is_chosen}
        layer = [
            first_layer(x, path) if path in own else x
            for x, path in zip(leaves, paths, strict=True)
        ]
        given = GIVEN_SPECS.get({}).items()
        specs = {path: PartitionSpec(*s[1:]) if path in own else s for path, s in given}
        try:
            with holding(GIVEN_SPECS, specs), holding(STACKED, ()), holding(LAYER, 0):
                state = self._init_part(treedef.unflatten(layer), chosen)
        except (AttributeError, TypeError) as error:
            if "ShapeDtypeStruct" not in str(error):
                raise
            raise TypeError(
                "in_backward knows only the shapes of a layer in `init`, and a transformation "
                "inside it reads values, as optax.inject_hyperparams does: put that behind "
                "in_backward in the chain, or leave it out."
            ) from error
        return jax.tree.map(lambda x: stacked(x, size), state, is_leaf=is_own)

    def _init_part(self, params: Any, chosen: Sequence[bool]) -> Any:
        with holding(PATHS, tuple(paths_of(params))):
            return self.exchange.init(part_of(params, chosen))

    def attach(self, params: Any, state: Any) -> Any:
        nodes = jax.tree.leaves(state, is_leaf=_is_state)
        found = [x for x in nodes if _is_state(x) and x.stacks.paths == self.layers]
        if len(found) != 1:
            raise ValueError(
                f"attach needs the state of one jaxcomm.in_backward of {list(self.layers)}, found "
                f"{len(found)}; pass what tx.init or tx.update returned. With optax.partition, put "
                "one in_backward before it, and partition the optimizers."
            )
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_parameter)
        paths = paths_of(params)
        of = places(paths, self.layers)
        for number, (own, size) in enumerate(
            zip(found[0].layers, found[0].stacks.sizes, strict=True)
        ):
            known = leaf_paths(own)  # a part of optax.partition does not have all leaves
            is_chosen = [x == number and path in known for x, path in zip(of, paths, strict=True)]
            chosen = [i for i, x in enumerate(is_chosen) if x]
            if lost := sorted(known.difference(paths)):
                raise ValueError(
                    f"the state is that of a parameter {lost[0]}, which these parameters do not "
                    f"have ({', '.join(paths)}); call tx.init on these parameters."
                )
            for i in chosen:
                if is_sharded(leaves[i]):
                    raise ValueError(
                        f"parameter {paths[i]} is exchanged by jaxcomm.sharded and by "
                        "jaxcomm.in_backward; give each to one exchange."
                    )
                if is_attached(leaves[i]):
                    raise ValueError(f"parameter {paths[i]} is attached already; attach it once.")
                if jnp.shape(leaves[i])[:1] != (size,):
                    raise ValueError(
                        f"parameter {paths[i]} has shape {jnp.shape(leaves[i])}, and the state of "
                        f"its exchange is for {size} layers; call tx.init on these parameters."
                    )
            part = jax.tree.structure(part_of(params, is_chosen))
            shapes = {paths[i]: jnp.shape(leaves[i])[1:] for i in chosen}
            stack, carried = self._stack(part, shapes, own, size)
            for place, i in enumerate(chosen):
                leaves[i] = Attached(leaves[i], () if place else carried, None, stack, place)
        return treedef.unflatten(leaves)

    def _stack(
        self, part: Any, shapes: dict[str, tuple[int, ...]], state: Any, size: int
    ) -> tuple[Stack, tuple[jax.Array, ...]]:
        """A stack, and what its first leaf carries: the index of the layer, and its state."""
        like = jax.tree.map(of_one_layer, state, is_leaf=is_own)
        axis_name = axis_of(state, "in_backward")
        carried = (jnp.arange(size, dtype=jnp.float32), *to_floats(state))
        kinds = tuple((x.ndim - 1, x.dtype) for x in carried)
        specs = (PartitionSpec(), *specs_of(state, axis_name))
        paths, layer = tuple(shapes), tuple(shapes.values())
        # A stack is static: another one in the next step would make jax compile again.
        leaves, structure = jax.tree.flatten(like)
        what = (part, paths, layer, kinds, structure, tuple((x.shape, x.dtype) for x in leaves))
        if what in self.known:
            return self.known[what], carried

        def on_layer(grads: Arrays, carried: Arrays, params: Arrays) -> tuple[Arrays, Arrays]:
            number, *floats = carried
            with holding(LAYER, number.astype(jnp.int32)), jax.named_scope("jaxcomm.exchange"):
                local, params = mark_local(part.unflatten(grads)), part.unflatten(params)
                done, new = self.exchange.update(local, from_floats(floats, like), params)
            updates = jax.tree.leaves(done)
            count = jnp.where(none_of([is_nan(x) for x in updates]), 1.0, jnp.nan)
            return updates, [count, *to_floats(new)]

        made = Stack(axis_name, paths, layer, kinds, specs, on_layer)
        return self.known.setdefault(what, made), carried

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        refuse_wrappers()
        if said := sorted({"dense", "stage"}.intersection(extra_args)):
            raise ValueError(
                f"in_backward takes no {said[0]}=, as the layers were exchanged before `update`: "
                "leave it out, and the state counts the steps."
            )
        require_kind(state, InBackwardState)
        leaves, treedef = jax.tree.flatten(updates, is_leaf=is_parameter)
        paths = paths_of(updates)
        of = places(paths, state.stacks.paths)
        for path, leaf, number in zip(paths, leaves, of, strict=True):
            _check_place(path, leaf, number is not None)
        done, rest = [unmark_local(x.value) if is_attached(x) else x for x in leaves], state.rest
        if None in of:
            chosen = [number is None for number in of]
            masked = None if params is None else part_of(params, chosen)
            part, rest = self.exchange.update(part_of(updates, chosen), rest, masked, **extra_args)
            exchanged = iter(jax.tree.leaves(part))
            done = [next(exchanged) if c else x for x, c in zip(done, chosen, strict=True)]
        firsts = [leaves[of.index(i)].carried for i in range(len(state.layers))]
        counts, floats = [unmark_local(x[0]) for x in firsts], [unmark_local(x[1:]) for x in firsts]
        bad = [is_nan(x) for x, number in zip(done, of, strict=True) if number is None]
        taken = none_of([*bad, *[~(count <= 1) for count in counts]])
        layers = []
        for count, arrays, old in zip(counts, floats, state.layers, strict=True):
            keep = functools.partial(kept, taken & (count == 1))
            layers.append(jax.tree.map(keep, from_floats(arrays, old), old, is_leaf=is_own))
        rest = jax.tree.map(functools.partial(kept, taken), rest, state.rest, is_leaf=is_own)
        done = [jnp.where(taken, x, jnp.nan).astype(x.dtype) for x in done]
        return treedef.unflatten(done), InBackwardState(state.stacks, tuple(layers), rest)


def _is_state(node: Any) -> bool:
    return isinstance(node, InBackwardState)


def _check_place(path: str, leaf: Any, in_backward: bool) -> None:
    """Raises unless a gradient was exchanged where it should be."""
    if in_backward and not is_attached(leaf):
        raise ValueError(
            f"the gradient of {path} was not exchanged in the backward pass; give "
            "jaxcomm.value_and_grad what exchange.attach(params, state) returns, where exchange is "
            "what jaxcomm.in_backward returned."
        )
    if is_attached(leaf) and not in_backward:
        raise ValueError(
            f"the gradient of {path} was exchanged in the backward pass, by another "
            "jaxcomm.in_backward, and would be exchanged again; attach the state of this one only."
        )
