"""The report against programs that this machine compiles, and against forms that it never prints.

Expected bytes are formulas over shapes, group sizes and trip counts.
"""

import json
import math
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.wire import WireReport, wire_report

# The newest and the oldest jax print groups of devices in different ways.
pytestmark = pytest.mark.newest

AXES = [  # the lengths of the mesh's axes a, b, c, and the axes that exchange
    ((8,), "a"), ((2, 4), "a"), ((2, 4), "b"), ((2, 4), ("a", "b")), ((2, 4), ("b", "a")),
    ((2, 2, 2), ("a", "c")), ((2, 2, 2), ("c", "a")),
]  # fmt: skip
CALLS = {
    "all-reduce": lax.psum,
    "all-gather": lax.all_gather,
    "reduce-scatter": partial(lax.psum_scatter, tiled=True),
    "all-to-all": partial(lax.all_to_all, split_axis=0, concat_axis=0, tiled=True),
}
GRID = np.arange(8)
N = 16 * 24 * 4  # bytes of the array that each device holds in `report`


def mesh_of(lengths: tuple[int, ...], devices: Any = None) -> Mesh:
    grid = np.array(devices or jax.devices()).reshape(lengths)
    return Mesh(grid, ("a", "b", "c")[: len(lengths)], axis_types=(AxisType.Auto,) * len(lengths))


def report(f: Any, shape: Any = (16, 24), dtype: str = "float32", mesh: Any = None) -> WireReport:
    """Compiles f, in which every device holds an array of this shape and dtype."""
    mesh = mesh or mesh_of((8,))
    spec = P(mesh.axis_names)
    step = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((mesh.size * shape[0], *shape[1:]), dtype)
    return wire_report(jax.jit(step).lower(x).compile())


def hlo(body: str, computations: str = "", counts: str = "num_partitions=8") -> str:
    """A compiled program in the form that XLA prints, with these lines in its entry."""
    return f"""HloModule test, is_scheduled=true, entry_computation_layout={{()->f32[]}}, {counts}

1 "a file = (with, {{braces"

%sum (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  ROOT %add = f32[] add(%x, %x)
}}

{computations}
ENTRY %main (p: f32[16], q: s32[]) -> f32[16] {{
  %p = f32[16]{{0:T(128)}} parameter(0), metadata={{op_name="x['a, (b"}}
  %q = s32[] parameter(1)
{body}
}}

"""


def groups_of(report: WireReport) -> set[frozenset[int]]:
    (collective,) = report.collectives
    return {frozenset(group) for group in collective.groups}


def groups_along(grid: np.ndarray, axes: tuple[int, ...]) -> set[frozenset[int]]:
    """The sets of devices of a grid that differ along these axes only."""
    size = math.prod(grid.shape[i] for i in axes)
    last = np.moveaxis(grid, axes, range(-len(axes), 0))
    return {frozenset(group.tolist()) for group in last.reshape(-1, size)}


# --- Programs that are compiled here.


@pytest.mark.parametrize(("lengths", "axes"), AXES)
@pytest.mark.parametrize("op", CALLS)
def test_each_collective_over_each_axis(op: str, lengths: tuple[int, ...], axes: Any) -> None:
    found = report(lambda x: CALLS[op](x, axes), mesh=mesh_of(lengths))
    (entry,) = found.collectives
    numbers = tuple("abc".index(axis) for axis in axes)
    size = math.prod(lengths[i] for i in numbers)
    sent = (Fraction((size - 1) * N, size) * {"all-reduce": 2, "all-gather": size}.get(op, 1),) * 8
    assert (entry.op, entry.group_size, entry.times, entry.branch) == (op, size, 1, ())
    assert (set(entry.dtypes), sum(map(math.prod, entry.shapes))) == ({"f32"}, 16 * 24)
    assert groups_of(found) == groups_along(GRID.reshape(lengths), numbers)
    assert (entry.sent, found.bytes_per_device) == (sent, sent)
    assert type(found.bytes_max) is int
    assert (found.bytes_max, found.bytes_mean, found.rounds) == (sent[0], sent[0], 1)


def test_devices_are_numbered_by_their_place_in_the_mesh() -> None:
    devices = [jax.devices()[i] for i in (6, 0, 3, 1, 7, 2, 5, 4)]
    found = report(lambda x: lax.psum(x, "b"), mesh=mesh_of((4, 2), devices))
    assert groups_of(found) == groups_along(GRID.reshape(4, 2), (1,))
    found = report(lambda x: lax.psum(x, ("a", "b")), mesh=mesh_of((2, 2), devices[4:]))
    assert found.bytes_per_device == (Fraction(2 * 3 * N, 4),) * 4


def test_collectives_that_the_compiler_adds() -> None:
    def struct(shape: Any, mesh: Mesh, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))

    groups, mesh = groups_along(GRID.reshape(2, 4), (1,)), mesh_of((2, 4))
    matmul = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("a")))
    x, w = struct((64, 32), mesh, P("a", "b")), struct((32, 16), mesh, P("b"))
    found = wire_report(matmul.lower(x, w).compile())
    assert (groups_of(found), found.bytes_max) == (groups, Fraction(2 * 3 * (32 * 16 * 4), 4))

    # The newest jax prints these groups as a part of the one axis.
    x = struct((8, 16), mesh_of((8,)), P("a"))
    sums = jax.jit(lambda x: x.reshape(2, 4, 16).sum(1)).lower(x).compile()
    found = wire_report(sums).only("all-reduce")
    assert (groups_of(found), found.bytes_max) == (groups, Fraction(2 * 3 * (16 * 4), 4))


def test_fractions_of_bytes_are_exact() -> None:
    found = report(lambda x: lax.psum(x, "a"), (3,), "float16")
    assert found.bytes_max == found.bytes_mean == Fraction(2 * 7 * 3 * 2, 8)
    assert found.as_dict()["bytes_max"] == 10.5


@pytest.mark.parametrize(("dtype", "printed", "size"), [
    ("bool", "pred", 1), ("int8", "s8", 1), ("uint16", "u16", 2), ("float16", "f16", 2),
    ("uint32", "u32", 4), ("complex64", "c64", 8)
])  # fmt: skip
def test_dtypes(dtype: str, printed: str, size: int) -> None:
    found = report(lambda x: lax.ppermute(x, "a", [(0, 1)]), (5, 7), dtype)
    assert (found.collectives[0].dtypes, found.bytes_max) == ((printed,), 35 * size)


def test_bf16_is_four_bytes_where_the_compiler_promotes_it() -> None:
    found = report(lambda x: lax.psum(x, "a"), dtype="bfloat16")
    assert (found.collectives[0].dtypes, found.bytes_max) == (("f32",), Fraction(2 * 7 * N, 8))


def test_a_permute_charges_its_sources_alone() -> None:
    pairs = [(0, 1), (1, 0), (2, 2)]
    found = report(lambda x: lax.ppermute(x, "b", pairs), mesh=mesh_of((2, 4)))
    assert found.bytes_per_device == (N, N, 0, 0, N, N, 0, 0)
    assert found.bytes_mean == N // 2


def test_the_maximum_is_that_of_one_device_not_of_each_collective() -> None:
    def two_permutes(x: jax.Array) -> jax.Array:
        first = lax.ppermute(x[:4], "a", [(0, 1)])
        return jnp.concatenate([first, lax.ppermute(x[:6], "a", [(2, 3)])])

    found = report(two_permutes, (8,))
    assert found.bytes_per_device == (16, 0, 24, 0, 0, 0, 0, 0)
    assert (found.bytes_max, found.bytes_mean, found.rounds) == (24, 5, 2)


def test_combined_collectives_add_up() -> None:
    def tree(x: jax.Array) -> jax.Array:
        a, b, c = lax.psum((x, x[0], x[:3].astype("float16")), "a")
        return a + b.sum() + c.sum().astype("float32")

    n = 4 * (16 * 24 + 24) + 2 * (3 * 24)
    assert report(tree).bytes_max == Fraction(2 * 7 * n, 8)


def test_loops_count_by_their_trips() -> None:
    def inner(_: Any, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, "a", tiled=True)[:16] + 1

    def outer(_: Any, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, inner, lax.psum(x, "a") / 8)

    found = report(lambda x: lax.fori_loop(0, 5, outer, x))
    assert {c.op: c.times for c in found.collectives} == {"all-reduce": 5, "all-gather": 5 * 3}
    assert found.only("all-gather").bytes_max == 5 * 3 * 7 * N
    assert (found.bytes_max, found.rounds) == (5 * 2 * 7 * N / 8 + 5 * 3 * 7 * N, 5 + 5 * 3)


def test_a_loop_of_unknown_length_has_no_total() -> None:
    def again(x: jax.Array) -> jax.Array:
        return lax.pmax(x.sum(), "a") > 1

    found = report(lambda x: lax.while_loop(again, lambda x: lax.psum(x, "a") / 100, x))
    assert {c.times for c in found.collectives} == {None}
    (loop,) = found.unknown_loops
    for total in ("bytes_max", "bytes_mean", "rounds"):
        with pytest.raises(ValueError, match=rf"trip count of .*{loop}.*lax\.scan"):
            getattr(found, total)
    assert f"total: unknown, as are the trips of {loop}" in str(found)
    assert "bytes_max" not in found.as_dict()


def test_branches_apart_and_at_worst() -> None:
    def step(x: jax.Array) -> jax.Array:
        sync = lax.cond(x.sum() > 0, lambda x: lax.psum(x, "a"), lambda x: x * 2, x)
        return lax.all_to_all(sync, "a", 0, 0, tiled=True)

    found = report(step)
    always, psum = Fraction(7 * N, 8), Fraction(2 * 7 * N, 8)
    ((name, branches),) = found.conditionals
    quiet, loud = (found.by_branch()[name, i] for i in range(branches))
    assert [c.branch for c in found.only("all-reduce").collectives] == [((name, 1),)]
    assert (quiet.bytes_max, quiet.rounds) == (always, 1)
    assert (loud.bytes_max, loud.rounds) == (always + psum, 2)
    assert (found.bytes_max, found.rounds) == (always + psum, 2)
    assert (quiet.conditionals, quiet.only("all-reduce").collectives) == ((), ())


def test_a_program_without_collectives() -> None:
    found = report(lambda x: x * 2)
    assert (found.collectives, found.devices, found.bytes_per_device) == ((), 8, (0,) * 8)
    assert (found.bytes_max, found.bytes_mean, found.rounds) == (0, 0, 0)


# --- Forms that compiled programs print elsewhere.


@pytest.mark.parametrize(("printed", "expected"), [
    ("{{0,1},{2,3},{4,5},{6,7}}", groups_along(GRID.reshape(4, 2), (1,))),
    ("{}", {frozenset(range(8))}),
    ("[2,4]<=[8]", groups_along(GRID.reshape(2, 4), (1,))),
    ("[4,2]<=[2,4]T(1,0)", groups_along(GRID.reshape(2, 4), (0,))),
    ("[2,4]<=[2,2,2]T(1,0,2)", groups_along(GRID.reshape(2, 2, 2), (0, 2))),
    ("[4,2]<=[2,2,2]", groups_along(GRID.reshape(4, 2), (1,))),
    ("mesh['a'=2,'b'=4] {'a'}", groups_along(GRID.reshape(2, 4), (0,))),
    ("mesh[a=2,b=4] {b}", groups_along(GRID.reshape(2, 4), (1,))),
    ("mesh['a, b'=2,'b'=1,'c'=4] {'c','b','a, b'}", {frozenset(range(8))}),
    ("mesh['a'=8] {'a':(1)2}", groups_along(GRID.reshape(2, 4), (0,))),
    ("mesh['a'=8] {'a':(4)2,'a':(1)2}", groups_along(GRID.reshape(2, 2, 2), (0, 2))),
    ("mesh['a'=2,'b'=4] {'b':(2)2,'a'}", groups_along(GRID.reshape(2, 2, 2), (0, 2))),
    ("mesh['a'=2,'b'=4] {}", {frozenset([i]) for i in range(8)}),
    ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", groups_along(GRID.reshape(4, 2), (0,))),
    ("mesh['a'=2,'b'=4], device_ids=(7,0,6,1,5,2,4,3) {'b'}",
     groups_along(np.array([7, 0, 6, 1, 5, 2, 4, 3]).reshape(2, 4), (1,))),
])  # fmt: skip
def test_printed_groups(printed: str, expected: set[frozenset[int]]) -> None:
    line = f"  ROOT %r = f32[16] all-reduce(%p), channel_id=1, replica_groups={printed}, a=b"
    found = wire_report(hlo(line))
    size = len(min(expected, key=len))
    assert (groups_of(found), found.rounds) == (expected, size > 1)
    assert found.bytes_per_device == (Fraction(2 * (size - 1) * 64, size),) * 8


def test_replicas_are_devices_too() -> None:
    line = "  ROOT %r = f32[16]{0} all-reduce(p), replica_groups={}, to_apply=sum"
    found = wire_report(hlo(line, counts="replica_count=4"))
    assert found.bytes_per_device == (Fraction(2 * 3 * 64, 4),) * 4


ALL = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}"
WRAPPED = f"""\
%wrapped (w: f32[16]) -> f32[2] {{
  %w = f32[16]{{0}} parameter(0)
  ROOT %inner = f32[2]{{0}} reduce-scatter(%w), {ALL}, dimensions={{0}}, to_apply=%sum
}}, execution_thread="parallel"
"""


@pytest.mark.parametrize(("line", "op", "sent"), [
    ("%r = f32[16]{0} all-reduce-start(%p), {ALL}, to_apply=%sum", "all-reduce", 14 * 64 / 8),
    ("%r = (f32[16]{0}, f32[128]{0}) all-gather-start(f32[16]{0:T(128)} %p), {ALL}, dimensions={0}",
     "all-gather", 7 * 64),
    ("%r = ((f32[16]{0}), f32[2]{0}) reduce-scatter-start(p), {ALL}", "reduce-scatter", 7 * 64 / 8),
    ("%r = ((f32[16]), f32[2], s32[]) async-start(%p), calls=%wrapped", "reduce-scatter", 56),
    ("%r = ((c128[8,2]{1,0:T(8,128)S(1)}), c128[8,2]{1,0}) all-to-all-start(c128[8,2]{1,0} %p), "
     '{ALL}, metadata={op_name="f[axis_name=(\\\'a\\\',) \\"x, ("}', "all-to-all", 7 * 256 / 8),
    ("%r = (f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%p), channel_id=1, "
     "source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}",
     "collective-permute", 64),
    ("%r = (f32[2], s32[]) all-reduce((f32[2], /*index=1*/s32[]) %t), {ALL}", "all-reduce", 21),
    ("%r = f32[16] ragged-all-to-all(%p, %p, /*index=2*/%q), {ALL}", "ragged-all-to-all", 64),
    ("%r = u4[10]{0:E(4)} all-gather(u4[5]{0:E(4)} %p), {ALL}", "all-gather", 7 * 3),
    ("%r = s4[10]{0} all-gather(s4[5]{0} %p), {ALL}", "all-gather", 7 * 5),
    ("%r = f64[] all-reduce(f64[] %p), {ALL}", "all-reduce", 14),
    ("%r = f8e4m3fn[16] all-to-all(f8e4m3fn[16]{0} %p), {ALL}", "all-to-all", 14),
    ("%r = bf16[<=4] all-reduce(bf16[<=4]{0} %p), {ALL}", "all-reduce", 14),
])  # fmt: skip
def test_printed_operations(line: str, op: str, sent: float) -> None:
    done = "  ROOT %done = f32[2]{0} async-done(%r), calls=%wrapped"
    found = wire_report(hlo(f"  {line.replace('{ALL}', ALL)}\n{done}", WRAPPED))
    assert [c.op for c in found.collectives] == [op]
    assert (found.rounds, found.bytes_per_device) == (1, (sent,) * 8)


def test_a_broadcast_is_a_chain() -> None:
    line = "  ROOT %r = f32[16] collective-broadcast(%p), replica_groups={{3,0,1},{2,4}}"
    assert wire_report(hlo(line)).bytes_per_device == (64, 0, 64, 64, 0, 0, 0, 0)


def test_calls_count_once_for_each_call_site() -> None:
    calls = """\
  %h = (f32[16], u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true
  %f = f32[2] fusion(%p), kind=kCustom, calls=%wrapped
  %c = f32[2] call(%p), to_apply=%wrapped
  ROOT %k = f32[2] custom-call(%p), custom_call_target="x", called_computations={%wrapped, %sum}"""
    found = wire_report(hlo(calls, WRAPPED))
    assert (len(found.collectives), found.rounds, found.bytes_max) == (3, 3, 3 * 7 * 8)


CONTROL = f"""\
%small (s: f32[16]) -> f32[16] {{
  %s = f32[16] parameter(0)
  ROOT %sr = f32[16]{{0}} collective-permute(%s), source_target_pairs={{{{0,1}},{{2,2}}}}
}}

%large (l: f32[16]) -> f32[16] {{
  ROOT %lr = f32[16]{{0}} all-gather(f32[16]{{0}} %l), {ALL}, dimensions={{0}}
}}

%either (e: f32[16]) -> f32[16] {{
  ROOT %cond.2 = f32[16]{{0}} conditional(%e, %e), true_computation=%large, false_computation=%small
}}

%again (a: f32[16]) -> pred[] {{
  ROOT %ar = pred[] collective-permute(pred[] %a), source_target_pairs={{{{0,1}}}}
}}
"""
COND = "  %c = f32[16] conditional(%q, %p, %p), branch_computations={%either, %small, %sum}\n"
TRIPS = r'{"a":"}","known_trip_count":{"n":"10"}}'


def test_nested_conditionals() -> None:
    found = wire_report(hlo(COND, CONTROL))
    paths = [(("c", 0), ("cond.2", 0)), (("c", 0), ("cond.2", 1)), (("c", 1),)]
    assert [c.branch for c in found.collectives] == paths
    assert set(found.conditionals) == {("c", 3), ("cond.2", 2)}
    assert (found.bytes_max, found.rounds) == (7 * 64, 1)
    by_branch = found.by_branch()
    first_two = [by_branch["c", i].bytes_per_device[:2] for i in range(3)]
    assert first_two == [(7 * 64, 7 * 64), (64, 0), (0, 0)]
    assert by_branch["cond.2", 0].bytes_max == 64
    assert by_branch["c", 0].by_branch()["cond.2", 1].rounds == 1


@pytest.mark.parametrize("config", [TRIPS, json.dumps(TRIPS)], ids=["json", "string"])
def test_a_loop_runs_its_condition_once_more(config: str) -> None:
    loop = f"  %w = f32[16] while(%p), condition=%again, body=%either, backend_config={config}"
    found = wire_report(hlo(loop, CONTROL))
    assert found.rounds == 11 + 10
    assert found.bytes_per_device == (11 * 1 + 10 * 448, *(10 * 448,) * 7)


def test_an_unknown_loop_inside_other_loops() -> None:
    loop = "  %{} = f32[16] while(%p), condition=%sum, body=%{}"
    body = f"%body (p: f32[16]) -> f32[16] {{\n{loop.format('inner', 'large')}\n}}\n"
    known = f"{loop.format('known', 'body')}, backend_config={TRIPS}"
    found = wire_report(hlo(loop.format("outer", "body") + "\n" + known, CONTROL + body))
    loops = [(c.times, c.unknown_loops) for c in found.collectives]
    assert loops == [(None, ("outer", "inner")), (None, ("inner",))]


def test_a_report_is_shown_as_a_table_and_as_data() -> None:
    found = wire_report(hlo(COND + f"  %r = f32[16] all-reduce(%p), {ALL}", CONTROL))
    table = [line.split() for line in str(found).splitlines()]
    assert table[1] == ["collective-permute", "f32", "16", "2", "1", "64", "8", "c[0]", "cond.2[0]"]
    assert table[4] == ["all-reduce", "f32", "16", "8", "1", "112", "112"]
    assert table[5][:7] == ["total:", "a", "device", "sends", "at", "most", "560"]
    data = found.as_dict()
    assert json.loads(json.dumps(data)) == data
    assert (data["bytes_max"], data["rounds"], data["devices"]) == (560, 2, 8)
    assert data["collectives"][3]["sent"] == [112] * 8


def test_what_is_not_compiled_is_refused_with_the_cure() -> None:
    step = jax.jit(lambda x: x + 1)
    lowered = step.lower(1.0)
    cure = r"type wire_report\(jax\.jit\(step\)\.lower\(\*args\)\.compile\(\)\)"
    for wrong in (step, lowered, 3):
        with pytest.raises(TypeError, match=cure):
            wire_report(wrong)
    for text, kind in ((lowered.as_text(), "StableHLO"), (lowered.as_text("hlo"), ""), ("", "")):
        with pytest.raises(ValueError, match=f"{kind}.*{cure}"):
            wire_report(text)


@pytest.mark.parametrize(("line", "message"), [
    ("%r = f32[16] all-reduce(%p), replica_groups={{0,8}}", "device 8 sends in a program of 8"),
    ("%r = f32[16] all-reduce(%p), replica_groups={{0,1}", "a bracket stays open"),
    ("%r = f32[16] all-reduce(%nowhere), replica_groups={}", "it lacks 'nowhere'"),
    ("%r = f32[16] call(%p), to_apply=%nowhere", "it lacks 'nowhere'"),
    ("%r = odd[16] all-reduce(odd[16] %p), replica_groups={}", "unknown dtype 'odd'"),
    ("%r = (f32[16], u32[], token[]) send(%p, %t), channel_id=1", "from device to device"),
    ("%r = f32[16] collective-permute(%p), source_target_pairs={}, slice_sizes={{4}}", "a form of"),
    ("%r = f32[16] collective-broadcast(%p, %q), has_dynamic_root=true", "a form of"),
])  # fmt: skip
def test_what_cannot_be_counted_is_not_guessed(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wire_report(hlo(f"  {line}"))
    with pytest.raises(ValueError, match="'allreduce'.*all-reduce"):
        wire_report(hlo("")).only("allreduce")
