"""The trace of a step that stands for a model's, and the collectives in it."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _axes, _branches, _notes, _paths
from jaxcomm._attached import exchanged
from jaxcomm._branches import NamedBranch
from jaxcomm._marks import GRADIENT, kind_of
from jaxcomm.gradients import value_and_grad
from jaxcomm.transforms import (
    LocalStepsState,
    ShardedState,
    gather,
    local_params,
    sharded_params,
)
from jaxcomm.wire import _report as wire
from jaxcomm.wire._report import SHARE, Branch, Bytes, WireReport, exact

_OPERATIONS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


_CHOICES = ("cond", "while")  # a loop of one turn or none is named as a conditional is


class Collective(NamedTuple):
    """A collective of the jaxpr: where it is, what it sends, and how often.

    For each conditional in `branch`, `conditions` has its number of branches and the named ones.
    """

    scope: str
    branch: Branch
    conditions: tuple[tuple[int, tuple[NamedBranch, ...]], ...]
    when: str
    operation: str
    dtype: str
    times: int
    sent: tuple[Bytes, ...]  # by each device of the mesh, in one execution
    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]


def wire_of(collectives: Sequence[Collective], devices: int) -> WireReport:
    """The report of these collectives, added up as those of compiled programs are."""
    conditionals: dict[str, int] = {}
    named: dict[NamedBranch, None] = {}
    for c in collectives:
        for (name, _), (count, names) in zip(c.branch, c.conditions, strict=True):
            conditionals[name] = count
            named |= dict.fromkeys(names)
    sent = (
        wire.Collective(
            c.scope,
            c.operation,
            (c.dtype,),
            c.shapes,
            c.groups,
            max(map(len, c.groups)),
            c.sent,
            c.times,
            c.branch,
        )
        for c in collectives
    )
    return WireReport(tuple(sent), devices, tuple(conditionals.items()), tuple(named))


def nodes_of(tree: Any, kinds: Any) -> list[Any]:
    """The nodes of these types, the outermost first, including those inside one another."""
    is_one = lambda x: isinstance(x, kinds)  # noqa: E731
    found = []
    for node in filter(is_one, jax.tree.leaves(tree, is_leaf=is_one)):
        inside = node if isinstance(node, tuple) else ()
        found += [node, *(x for part in inside for x in nodes_of(part, kinds))]
    return found


def trace(tx: Any, params: Any, state: Any, axis_name: Any, extra_args: Mapping[str, Any]) -> Any:
    """The jaxpr of a step whose loss uses all parameters."""
    made = [note for note in (_notes.NOTES.get() or {}).values() if hasattr(note, "attach")]
    attached = list({id(note): note for note in made}.values())
    world = _axes.axis_size(axis_name)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        total = functools.partial(_total, stacks=[path for x in attached for path in x.layers])
        return total(gather(params)) * jnp.mean(batch)

    def step(params: Any, state: Any, batch: jax.Array) -> Any:
        at = params
        for exchange in attached:
            at = exchange.attach(at, state)
        if nodes_of(state, ShardedState):
            at = sharded_params(at, state)
        if nodes_of(state, LocalStepsState):
            at = local_params(state)
        value, grads = value_and_grad(loss, axis_name)(at, batch)
        updates, state = tx.update(grads, state, params, **extra_args)
        _refuse_parts(updates)
        return value, (updates, state)

    # Placed, as batches of several processes are.
    rows = jax.NamedSharding(_axes.current_mesh(), jax.P(axis_name))
    batch = jax.ShapeDtypeStruct((world,), jnp.float32, sharding=rows)
    return jax.make_jaxpr(step)(params, state, batch).jaxpr


def _refuse_parts(updates: Any) -> None:
    """Raises if some leaves were exchanged and others are local gradients still."""
    named = jax.tree_util.tree_leaves_with_path(updates)
    left = [_paths.path_name(path) for path, x in named if kind_of(x) == GRADIENT]
    if left and len(left) < len(named):
        raise ValueError(
            f"the gradient of {left[0]} is not exchanged, as with optax.masked, and no step could "
            "add it. To freeze it: optax.partition, with jaxcomm.set_to_zero for its part."
        )


def _total(params: Any, stacks: list[str]) -> jax.Array:
    """The sum of all parameters; a scan goes through stacks layer by layer."""
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: hasattr(x, "stack"))
    leaves = {_paths.path_name(path): x for path, x in found}
    total = jnp.zeros((), jnp.float32)
    for stack in stacks:
        of_stack = [path for path in leaves if f"{path}/".startswith(f"{stack}/")]
        own = {path: leaves.pop(path) for path in of_stack}
        add = lambda sum_, layer: (sum_ + _sum(exchanged(layer)), None)  # noqa: E731
        total, _ = jax.lax.scan(add, total, own)
    return total + _sum(leaves)


def _sum(tree: Any) -> jax.Array:
    return sum(
        (jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(tree)), jnp.zeros((), jnp.float32)
    )


def collectives_in(
    jaxpr: Any,
    mesh: dict[str, int],
    scope: str = "",
    branch: Branch = (),
    conditions: tuple[tuple[int, tuple[NamedBranch, ...]], ...] = (),
    when: str = "",
    times: int = 1,
) -> Iterator[Collective]:
    """All collectives of a program, in order."""
    for eqn in jaxpr.eqns:
        name, here = eqn.primitive.name, f"{scope}/{eqn.source_info.name_stack}"
        if name in _OPERATIONS:
            groups = _groups(eqn, mesh)
            sent = _sent(eqn, groups, math.prod(mesh.values()))
            shapes = tuple(var.aval.shape for var in eqn.invars)
            dtype = "+".join(dict.fromkeys(var.aval.dtype.name for var in eqn.invars))
            if any(sent):
                operation = _OPERATIONS[name]
                yield Collective(
                    here, branch, conditions, when, operation, dtype, times, sent, shapes, groups
                )
        again = times * eqn.params.get("length", 1) if name == "scan" else times
        names = tuple(_branches.read(str(id(eqn)), f"{here}/{name}")) if name in _CHOICES else ()
        is_choice = name == "cond" or bool(names)
        named, parts = {x.number: x for x in names}, list(_inner(eqn))
        if name == "while" and not (names or _branches.is_once(f"{here}/{name}")):
            for _ in itertools.chain(*(collectives_in(inner, mesh, here) for inner in parts)):
                raise ValueError(
                    "explain cannot add up what is sent in a jax.lax.while_loop, whose number of "
                    f"trips is not known before it runs, in {here}; use jax.lax.scan."
                )
        for i, inner in enumerate(parts):
            inside, of, called = branch, conditions, when
            if is_choice:
                inside, of = (*branch, (str(id(eqn)), i)), (*conditions, (len(parts), names))
                called = ", ".join(filter(None, (when, _branch_name(named.get(i), i))))
            yield from collectives_in(inner, mesh, here, inside, of, called, again)


def _groups(eqn: Any, mesh: dict[str, int]) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that exchange with each other; for a permute, (source, target)."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    names = axes if isinstance(axes, tuple) else (axes,)
    own = [list(mesh).index(name) for name in names]
    devices = np.arange(math.prod(mesh.values())).reshape(*mesh.values())
    size = math.prod(mesh[name] for name in names)
    rows = np.moveaxis(devices, own, range(-len(own), 0)).reshape(-1, size)
    parts = eqn.params.get("perm") or eqn.params.get("axis_index_groups") or [range(size)]
    return tuple(tuple(row[list(part)].tolist()) for row in rows for part in parts)


def _sent(eqn: Any, groups: tuple[tuple[int, ...], ...], devices: int) -> tuple[Bytes, ...]:
    """Bytes that each device of the mesh sends in a collective."""
    held = sum(var.aval.size * var.aval.dtype.itemsize for var in eqn.invars)
    sent: list[Bytes] = [0] * devices
    for group in groups:
        # Of a pair only the source sends, and nothing moves from a device to itself.
        last = len(set(group)) - 1 if "perm" in eqn.params else None
        for device in group[:last]:
            sent[device] += SHARE[_OPERATIONS[eqn.primitive.name]](len(group)) * held
    return tuple(map(exact, sent))


def _inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation runs; the condition of a loop first."""
    for _, value in sorted(eqn.params.items(), key=lambda pair: pair[0] == "body_jaxpr"):
        for part in value if isinstance(value, tuple | list) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield part


def _branch_name(named: Any, number: int) -> str:
    if named is None:
        return f"branch {number}"
    return f"{named.name}, 1 step in {named.every}" if named.every else named.name
