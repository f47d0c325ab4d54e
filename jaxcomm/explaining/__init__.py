"""How a chain treats each parameter, read from its trace; nothing is compiled.

A loss that uses every parameter stands in for the model's. One step with it is traced, and its
collectives are found in the jaxpr. The library leaves notes beside them (`jaxcomm._notes`): which
leaves of which layout, in which bucket, in which format. What has no note is small: flags, scales,
the loss.
"""

import itertools
import math
import operator
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axes, _hosts, _notes, _paths
from jaxcomm._context import holding
from jaxcomm._notes import Message
from jaxcomm.collectives.reductions import CodedMean
from jaxcomm.explaining._explanation import Explanation, Leaf, Sent
from jaxcomm.explaining._program import Collective, collectives_in, nodes_of, trace, wire_of
from jaxcomm.transforms import (
    ControlVariatesState,
    FactoredAdamState,
    InBackwardState,
    LocalState,
    LocalStepsState,
    LowRankMeanState,
    MajorityVoteState,
    MeanState,
    MultiStepsState,
    NoExchangeState,
    OneBitAdamState,
    ShardedState,
    SparseMeanState,
    StagesState,
    _roles,
    state_spec,
)
from jaxcomm.transforms._layout import Layout
from jaxcomm.transforms._shapes import shapes_of
from jaxcomm.transforms._specs import names_in
from jaxcomm.transforms.per_device import is_own
from jaxcomm.wire._report import SHARE, Bytes, exact

__all__ = ["Explanation", "Leaf", "Sent", "explain"]

_FEEDBACK = (
    "error feedback: below int4 the momentum of SGD before it, jaxcomm.local(axis, "
    "optax.trace(0.9, nesterov=True)), and with Adam the mean inside jaxcomm.factored_adam"
)


_COARSE = "SGD without momentum after it: fewer than 4 bits lose accuracy before others"


_LIKE_DATA = "data that are alike on all devices, or jaxcomm.control_variates before it"


_OPTIMIZER = "it is the optimizer: nothing that keeps moments goes after it"


_NEEDS: dict[type, tuple[str, str]] = {
    MeanState: ("mean", "any optimizer after it"),
    MajorityVoteState: ("majority_vote", f"SGD with a rate for signs; {_LIKE_DATA}"),
    SparseMeanState: ("sparse_mean", "SGD after it; dense_steps= for a warm-up"),
    LowRankMeanState: ("low_rank_mean", "SGD after it; dense_steps= for a warm-up"),
    OneBitAdamState: ("one_bit_adam", f"{_OPTIMIZER}; its first steps are dense"),
    FactoredAdamState: ("factored_adam", f"{_OPTIMIZER}; no warm-up"),
    ControlVariatesState: ("control_variates", "jaxcomm.majority_vote after it"),
    LocalState: ("local", "an exchange after it"),
    LocalStepsState: (
        "local_steps",
        "gradients at jaxcomm.local_params(state); nothing after it: its optimizers are inside",
    ),
    MultiStepsState: ("multi_steps", "to wrap the whole chain"),
    StagesState: ("stages", "what each of its stages needs"),
    InBackwardState: ("in_backward", "attach() and jaxcomm.exchanged in the loss"),
    ShardedState: (
        "sharded",
        "jaxcomm.sharded_params(params, state) and jaxcomm.gather; under jax.checkpoint everything "
        "is gathered twice in a step",
    ),
    NoExchangeState: ("no_exchange", "nothing; devices drift apart"),
}


_WITH_AN_EXCHANGE = (FactoredAdamState, LocalStepsState, ControlVariatesState)


def explain(tx: Any, params: Any, **extra_args: Any) -> Explanation:
    """Shows how each parameter is sent, in how many bytes, and what a chain needs.

    Nothing is compiled.

    Bytes are those of the program as it is traced, for one step with every branch listed.
    `jaxcomm.wire_report` reads the compiled program of a whole step: trust its bytes. They include
    what the optimizer after `jaxcomm.sharded` sends, and what each microbatch sends.

    Args:
      tx: a transformation of jaxcomm, alone or in a chain, as `tx.update` is called in a step.
      params: the parameters, as arrays or as `jax.ShapeDtypeStruct`s such as those of
        `jax.eval_shape`; with their shardings if they are sharded.
      **extra_args: the keyword arguments of `tx.update` in a step, such as `value`, as arrays.

    Returns:
      An `Explanation`: print it, or read its `leaves`, `messages`, `bytes_max`, `own_bytes` and
      `needs`. `wire.per_step` has the average over a run.

    Raises:
      TypeError: if `tx` is not a transformation.
      ValueError: if no mesh is set, nothing in `tx` exchanges gradients, or `tx.init` refuses the
        parameters.

    Wire: nothing.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm, optax
      >>> tx = optax.chain(jaxcomm.mean("data", "int8", error_feedback=True), optax.sgd(0.1))
      >>> params = jax.eval_shape(lambda: {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)})
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
      ...     print(jaxcomm.explain(tx, params))
      2 parameters of 4,160 values on 4 devices
      <BLANKLINE>
      parameter  shape     travels          in
      b          (64,)     float32, native  exempt
      w          (64, 64)  int8, direct     bucket 1
      <BLANKLINE>
      message      form             bytes  hops
      flags, loss  float32          6      all-reduce 6
      bucket 1     int8, direct     6,240  all-to-all 3,120, all-gather 3,120
      exempt       float32, native  384    all-reduce 384
      A device sends at most 6,630 bytes in a step, 1.59 a value; a float32 mean 6.00.
      State on a device: 16,384 bytes that differ from device to device, 4 others.
      <BLANKLINE>
      First in the chain: the exchange; only jaxcomm.local may come before it. What it needs:
      - mean: error feedback: below int4 the momentum of SGD before it, jaxcomm.local(axis,
        optax.trace(0.9, nesterov=True)), and with Adam the mean inside jaxcomm.factored_adam
    """
    mesh = _checked(tx, params)
    notes: _notes.Notes = {}
    with holding(_notes.NOTES, notes):
        state = shapes_of(tx.init, params)
        specs = state_spec(tx, params, mesh)
        layouts = nodes_of(state, Layout)
        if not layouts or not _roles.exchanges(state):
            raise ValueError(
                "nothing in this chain exchanges gradients; put jaxcomm.mean or another method "
                "first: optax.chain(jaxcomm.mean('data'), optimizer)."
            )
        typed = _typed(state, specs) if _axes.explicit_axes() else state
        program = trace(tx, params, typed, layouts[0].axis_name, extra_args)
    collectives = list(collectives_in(program, dict(mesh.shape)))
    messages, wire = _messages(collectives, notes, mesh), wire_of(collectives, mesh.size)
    leaves = _leaves(params, messages)
    dense = _dense_bytes(layouts, leaves)
    own, shared = _memory(state, specs, mesh)
    world = max(layout.world for layout in layouts)
    hosts = [_hosts.host_of(device) for device in mesh.devices.flat]
    between = wire.bytes_between(hosts) if 1 < len(set(hosts)) < mesh.size else None
    needs, alike = _needs(state, _coarse(collectives, notes)), _alike(layouts, mesh)
    is_exempt = _all_exempt(layouts) and any(message.leaves for message in messages)
    return Explanation(
        mesh.size,
        leaves,
        messages,
        wire,
        dense,
        own,
        shared,
        needs,
        world,
        alike,
        is_exempt,
        between,
    )


def _all_exempt(layouts: list[Layout]) -> bool:
    """Whether no leaf is compressed, because of its shape or its name."""
    filled = [leaf for layout in layouts for leaf in layout.leaves if math.prod(leaf.shape)]
    return all(leaf.exempt for leaf in filled)


def _alike(layouts: list[Layout], mesh: Any) -> tuple[str, ...]:
    """The axes of several devices that neither exchange nor split what is compressed."""
    used: set[str] = set()
    for layout in layouts:
        used.update(_axes.names_of(layout.axis_name))
        used.update(*(names_in(leaf.spec) for leaf in layout.leaves if not leaf.exempt))
    return tuple(name for name in mesh.axis_names if name not in used and mesh.shape[name] > 1)


def _checked(tx: Any, params: Any) -> jax.sharding.Mesh:
    """The mesh that is set.

    Raises:
      TypeError, ValueError: as `explain`.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"explain takes an optax transformation, got a {type(tx).__name__}; write "
            "jaxcomm.explain(optax.chain(jaxcomm.mean('data'), optax.adam(1e-3)), params)."
        )
    wrong = [leaf for leaf in jax.tree.leaves(params) if not hasattr(leaf, "dtype")]
    if wrong:
        raise TypeError(f"params is a pytree of arrays or of their shapes, got {wrong[0]!r} in it.")
    if not jax.tree.leaves(params):
        raise ValueError(f"there are no parameters in {params!r}; pass the pytree of them.")
    _axes.current_mesh()
    if _axes.manual_axes():
        raise ValueError("explain traces a whole step: call it outside jax.shard_map.")
    return jax.sharding.get_mesh()


def _messages(collectives: list[Collective], notes: _notes.Notes, mesh: Any) -> tuple[Sent, ...]:
    """The messages of a program: its collectives, by their notes."""
    found: dict[tuple[Any, ...], list[Collective]] = {}
    for collective in collectives:
        on = _notes.read(collective.scope, notes)
        layout = next((x for x in reversed(on) if isinstance(x, Layout)), None)
        message = next((x for x in reversed(on) if isinstance(x, Message)), Message("small", ()))
        said = (x for kind in (str, tuple) for x in reversed(on) if type(x) is kind)  # a text first
        form = next(said, None)
        name = message.name if message.leaves else "small"
        paths = tuple(_path(layout, leaf) for leaf in message.leaves)
        inside = collective.branch, collective.when
        key = (name, paths, _form(form, mesh.size, layout), *inside, id(layout))
        if name == "small":
            key = (name, (), "", *inside, 0)
        found.setdefault(key, []).append(collective)
    counts: dict[str, int] = {}
    messages = []
    for (name, paths, form, branch, when, _), own in found.items():
        counts[name] = counts.get(name, 0) + 1
        once = {"small": "flags, loss", "exempt": "exempt"} if counts[name] == 1 else {}
        numbered = once.get(name, f"{name} {counts[name]}")
        form = form or "+".join(dict.fromkeys(c.dtype for c in own))
        hops, by_device = _hops(own), _by_device(own)
        messages.append(Sent(numbered, form, paths, hops, by_device, branch, when))
    return tuple(messages)


def _path(layout: Layout | None, leaf: Any) -> str:
    return layout.leaves[leaf].path if layout is not None and isinstance(leaf, int) else str(leaf)


def _form(noted: Any, devices: int, layout: Layout | None) -> str:
    """A format and an algorithm, in readable form; "" where no note names them."""
    if noted is None or isinstance(noted, str):
        return noted or ""
    what, algorithm = noted
    codec = getattr(what, "codec", what)
    name = getattr(codec, "name", "votes")
    if hasattr(what, "selection"):
        name = f"{what.selection.name} of {name}"
    back = getattr(what, "second_hop", codec)
    world = layout.world if layout is not None else devices
    chosen = algorithm.of(world) if hasattr(algorithm, "of") else algorithm
    return f"{name}{'' if back == codec else f', {back.name} back'}, {chosen.name}"


def _hops(collectives: list[Collective]) -> tuple[tuple[str, int, Bytes], ...]:
    """Equal operations in a row are one hop with a count."""
    hops: list[tuple[str, int, Bytes]] = []
    for operation, row in itertools.groupby(collectives, lambda c: c.operation):
        same = list(row)
        hops.append((operation, sum(c.times for c in same), max(_by_device(same))))
    return tuple(hops)


def _by_device(collectives: list[Collective]) -> tuple[Bytes, ...]:
    """Bytes that each device sends in all of them."""
    columns = zip(*(c.sent for c in collectives), strict=True)
    times = [c.times for c in collectives]
    return tuple(exact(sum(map(operator.mul, times, column))) for column in columns)


def _dense_bytes(layouts: list[Layout], leaves: tuple[Leaf, ...]) -> Bytes:
    """What a device sends in a float32 mean of the leaves that have messages; of all, if none has.

    Of what is split over other axes, a device has a part. A layout may be that of one layer of a
    stack, which says how each is split; all layers are counted.
    """
    sent = [leaf for leaf in leaves if leaf.messages] or leaves
    values = {leaf.path: math.prod(leaf.shape) for leaf in sent}
    shares = {}
    for layout in layouts:
        for leaf in layout.leaves:
            further = names_in(leaf.spec).difference(_axes.names_of(layout.axis_name))
            parts = math.prod(map(_axes.axis_size, further))
            of_all = Fraction(4 * values.get(leaf.path, 0), parts)
            shares[leaf.path] = SHARE["all-reduce"](layout.world) * of_all
    return exact(sum(shares.values()))


def _leaves(params: Any, messages: tuple[Sent, ...]) -> tuple[Leaf, ...]:
    """The parameters, each with the messages that carry it."""
    leaves = []
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = _paths.path_name(path)
        own = [message for message in messages if name in message.leaves and 0 not in jnp.shape(x)]
        forms = dict.fromkeys(message.form for message in own)
        travels = "; ".join(forms) or "not sent"
        leaves.append(Leaf(name, tuple(jnp.shape(x)), travels, tuple(m.name for m in own)))
    return tuple(leaves)


def _memory(state: Any, specs: Any, mesh: jax.sharding.Mesh) -> tuple[int, int]:
    """Bytes of state on a device: its own state, and what is equal on all devices or split."""

    def on_a_device(x: Any, spec: Any) -> int:
        parts = math.prod(mesh.shape[name] for name in names_in(spec))
        return math.prod(x.shape) * x.dtype.itemsize // parts

    own = shared = 0
    for node, spec in zip(
        jax.tree.leaves(state, is_leaf=is_own),
        jax.tree.leaves(specs, is_leaf=lambda x: is_own(x) or isinstance(x, jax.P)),
        strict=True,
    ):
        if is_own(node):
            own += sum(map(on_a_device, node.values, spec.values))
        else:
            shared += on_a_device(node, spec)
    return own, shared


def _typed(state: Any, specs: Any) -> Any:
    """A state whose types show its shardings: shapes of a state have only those of the exchange."""

    def of(x: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=jax.NamedSharding(_axes.current_mesh(), spec)
        )

    return jax.tree.map(of, state, specs)


def _coarse(collectives: list[Collective], notes: _notes.Notes) -> set[Layout]:
    """The layouts of means in few bits, whose errors nobody keeps."""
    found = set()
    for collective in collectives:
        on = _notes.read(collective.scope, notes)
        means = [x[0] for x in on if type(x) is tuple and isinstance(x[0], CodedMean)]
        for mean in means:
            hops = getattr(mean, "selection", mean.codec), mean.second_hop
            if not mean.keeps_errors and min(codec.bits_per_value for codec in hops) < 4:
                found.update(x for x in on if isinstance(x, Layout))
    return found


def _needs(state: Any, coarse: set[Layout]) -> tuple[tuple[str, str], ...]:
    """What each method needs, the outermost first."""
    found = nodes_of(state, tuple(_NEEDS))
    corrected = any(isinstance(node, ControlVariatesState) for node in found)
    outer = [x for x in found if isinstance(x, _WITH_AN_EXCHANGE)]
    inside = {id(node) for x in outer for node in nodes_of(tuple(x), (MeanState,))}
    needs = {}
    for node in found:
        name, text = _NEEDS[type(node)]
        if isinstance(node, MeanState) and (node.residual.values or node.layout in coarse):
            text = _FEEDBACK if node.residual.values else _COARSE
        if isinstance(node, MajorityVoteState):
            rate = "gradients" if node.residual.values else "signs"
            text = f"SGD with a rate for {rate}{'' if corrected else f'; {_LIKE_DATA}'}"
        if id(node) not in inside:
            needs[name, text] = None
    return tuple(needs)
