"""What CPU processes do in place of XLA's own sends, so that both directions of links are busy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
from jaxcomm import _axes
from jaxcomm.collectives import _sending
from jaxcomm.kernels import _device

DTYPES = [np.uint8, np.int8, bool, np.uint16, ml_dtypes.bfloat16, np.float32, np.uint32]


@pytest.fixture
def between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between CPU processes, for messages of any size."""
    monkeypatch.setattr(_device, "is_between_cpu_processes", lambda: True)
    monkeypatch.setattr(_sending, "LEAST_BYTES", 0)
    monkeypatch.setattr(_sending, "LEAST_SWAPPED", 0)


def by_device(
    f: Callable[[jax.Array], Any], mesh: Mesh, axes: Any = "data", check_vma: bool = False
) -> Any:
    """`f` of the row of each device; its results, a row for each."""
    spec = PartitionSpec(axes)
    rows = jax.shard_map(
        lambda x: f(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    return jax.jit(rows)


def test_swaps_are_told_from_other_rounds() -> None:
    pairs = [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert _sending.swaps_of(pairs) == pairs
    assert _sending.swaps_of([(0, 1), (1, 2), (2, 0)]) == []
    assert _sending.swaps_of([(0, 1), (2, 3), (1, 0)]) == [(0, 1), (1, 0)]
    assert _sending.swaps_of([]) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([(0, 3), (3, 0), (1, 2), (2, 1)], id="of-some"),
        pytest.param([(0, 3), (1, 4), (3, 0), (4, 5)], id="beside-others"),
    ],
)
def test_a_swap_is_a_ppermute(
    between_processes: None,
    make_mesh: Callable[[int], Mesh],
    dtype: Any,
    size: int,
    checks: bool,
    pairs: list[tuple[int, int]],
) -> None:
    """Of some devices too; the others get zeros. NaNs and infinities are bits like others."""
    words = np.random.default_rng(0).integers(0, 256, (6, 4 * size), np.uint8)
    x = words % 2 == 1 if dtype is bool else words.view(dtype)
    swap = by_device(lambda x: _sending.ppermute(x, "data", pairs), make_mesh(6), check_vma=checks)
    assert "all-reduce" in swap.lower(x).compile().as_text()
    expected = np.zeros_like(x)
    for source, target in pairs:
        expected[target] = x[source]
    found = np.asarray(swap(x))
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


def test_beside_a_swap_everyone_sends_one_message(
    between_processes: None, make_mesh: Callable[[int], Mesh]
) -> None:
    pairs = [(0, 3), (1, 4), (3, 0), (4, 5)]
    round_ = by_device(lambda x: _sending.ppermute(x, "data", pairs), make_mesh(6))
    report = jaxcomm.wire_report(round_.lower(np.zeros((6, 8), np.float32)).compile())
    assert list(report.bytes_per_device) == [32, 32, 0, 32, 32, 0]


def test_other_rounds_and_short_messages_are_permutes(
    between_processes: None, make_mesh: Callable[[int], Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, x = make_mesh(4), np.arange(16, dtype=np.float32).reshape(4, 4)
    around = [(r, (r + 1) % 4) for r in range(4)]
    ring = by_device(lambda x: _sending.ppermute(x, "data", around), mesh)
    assert "all-reduce" not in ring.lower(x).compile().as_text()
    monkeypatch.setattr(_sending, "LEAST_SWAPPED", 17)
    swap = by_device(lambda x: _sending.ppermute(x, "data", [(0, 1), (1, 0)]), mesh)
    assert "all-reduce" not in swap.lower(x).compile().as_text()


def test_short_messages_to_many_devices_are_sent_in_rounds(
    between_processes: None, make_mesh: Callable[[int], Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once they would not fit into the queues of links that they share."""
    monkeypatch.setattr(_sending, "LEAST_BYTES", 64)
    monkeypatch.setattr(_sending, "LEAST_TOGETHER", 128)
    f = by_device(lambda x: _sending.all_to_all(x, "data"), make_mesh(8))
    for values, in_rounds in ((3, False), (4, True)):  # to each device; 128 bytes are 4 to each
        program = f.lower(np.zeros((8, 8 * values), np.float32)).compile().as_text()
        assert ("all-to-all" in program) != in_rounds
        assert ("collective-permute" in program) == in_rounds


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3)])
@pytest.mark.parametrize("rows", [1, 2])
def test_an_all_to_all_by_rounds(
    between_processes: None,
    make_mesh: Callable[[int], Mesh],
    world: int,
    shape: tuple[int, ...],
    rows: int,
) -> None:
    size = world * world * rows * np.prod(shape)
    blocks = np.arange(size, dtype=np.uint16).reshape(world, world, rows, *shape)
    x = blocks.reshape(world, world * rows, *shape)
    f = by_device(lambda x: _sending.all_to_all(x, "data"), make_mesh(world))
    np.testing.assert_array_equal(f(jnp.asarray(x)), blocks.swapaxes(0, 1).reshape(x.shape))
    text = f.lower(x).compile().as_text()
    assert "all-to-all" not in text and ("all-reduce" in text) == (world % 2 == 0)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_two_devices_gather_by_a_swap(
    between_processes: None, make_mesh: Callable[[int], Mesh], world: int, tiled: bool
) -> None:
    x = np.arange(world * 6, dtype=np.int8).reshape(world, 2, 3)
    mesh = make_mesh(world)
    f = by_device(lambda x: _sending.all_gather(x, "data", tiled=tiled), mesh)
    expected = np.broadcast_to(x.reshape(-1, 3) if tiled else x, (world, *f(x).shape[1:]))
    np.testing.assert_array_equal(f(x), expected)
    assert ("all-reduce" in f.lower(x).compile().as_text()) == (world == 2)


OPERATIONS: dict[str, Callable[[jax.Array], Any]] = {
    "ppermute": lambda x: _sending.ppermute(x, "data", [(r, (r + 1) % 4) for r in range(4)]),
    "swap": lambda x: _sending.ppermute(x, "data", [(0, 2), (2, 0), (1, 3), (3, 1)]),
    "swap beside another": lambda x: _sending.ppermute(x, "data", [(0, 2), (2, 0), (1, 3)]),
    "all_to_all": lambda x: _sending.all_to_all(x, "data"),
    "all_gather": lambda x: _sending.all_gather(x, "data"),
    "all_gather, tiled": lambda x: _sending.all_gather(x, "data", tiled=True),
}


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_first_number_is_sent_and_the_rest_is_a_devices_own(
    name: str, is_long: bool, make_mesh: Callable[[int], Mesh], request: pytest.FixtureRequest
) -> None:
    if is_long:
        request.getfixturevalue("between_processes")
    x = np.arange(4 * 8, dtype=np.float32).reshape(4, 8)
    operation, mesh = OPERATIONS[name], make_mesh(4)

    def program() -> Any:
        return by_device(lambda x: operation(x), mesh).lower(x).compile()

    with _sending.first_only():
        short = program()
    sending = program()  # and those that are traced behind it send again
    few, all_ = (jaxcomm.wire_report(each).bytes_max for each in (short, sending))
    numbers = 2 if name == "all_to_all" else 8  # of a message
    assert few * numbers == all_ > 0
    found, expected = np.asarray(short(x)), np.asarray(sending(x))
    assert found.shape == expected.shape
    blocks, others = found.reshape(4, -1, numbers), expected.reshape(4, -1, numbers)
    np.testing.assert_array_equal(blocks[..., 0], others[..., 0])
    own = x.reshape(4, -1, numbers)
    if name == "all_to_all" and is_long:  # round k brings what was sent to k further on
        own = np.stack([[own[r, (2 * r - i) % 4] for i in range(4)] for r in range(4)])
        own[np.arange(4), np.arange(4)] = others[np.arange(4), np.arange(4)]
    np.testing.assert_array_equal(blocks[..., 1:], np.broadcast_to(own, blocks.shape)[..., 1:])


@pytest.mark.parametrize("axes", [("model", "data"), ("data", "model"), "data"])
def test_over_axes_in_another_order_than_the_mesh_has(
    between_processes: None, mesh4x2: Mesh, axes: Any
) -> None:
    world = 8 if isinstance(axes, tuple) else 4
    x = np.arange(world * world, dtype=np.float32).reshape(world, world)
    f = by_device(lambda x: _sending.all_to_all(x, axes), mesh4x2, axes)
    np.testing.assert_array_equal(f(x), x.T)
    assert len(_axes.names_of(axes)) * 4 == world


@pytest.mark.parametrize("algorithm", ["direct", "circulant", "halving_doubling", "ring"])
@pytest.mark.parametrize("world", [2, 4])
def test_swaps_send_the_same_bytes(
    make_mesh: Callable[[int], Mesh],
    monkeypatch: pytest.MonkeyPatch,
    world: int,
    algorithm: str,
) -> None:
    """And give the same bits; 262,144 values are long enough for all messages."""
    found = []
    for between in (False, True):
        monkeypatch.setattr(_device, "is_between_cpu_processes", lambda between=between: between)
        mesh = make_mesh(world)
        mean = by_device(lambda x: jaxcomm.pmean(x, "data", "bfloat16", algorithm), mesh)
        x = np.random.default_rng(0).standard_normal((world, 2**18), np.float32)
        program = mean.lower(x).compile()
        report = jaxcomm.wire_report(program)
        found.append((report.bytes_max, np.asarray(program(x))))
        is_swapped = any(c.op == "all-reduce" and c.group_size == 2 for c in report.collectives)
        one_way = algorithm in ("ring", "circulant")  # unless there are but two devices
        assert is_swapped == (between and (world == 2 or not one_way))
    (usual_bytes, usual), (swapped_bytes, swapped) = found
    assert usual_bytes == swapped_bytes == 4 * (world - 1) / world * 2**18
    np.testing.assert_array_equal(usual, swapped)


@pytest.mark.parametrize("kind", ["votes", "cnat"])
def test_one_direction_of_a_ring_comes_after_the_other(
    between_processes: None, make_mesh: Callable[[int], Mesh], kind: str
) -> None:
    """Neither needs the other, and XLA would mix their rounds, which takes twice the time."""
    world, n = 6, 6 * 4096
    if kind == "votes":
        tx = jaxcomm.majority_vote("data", "two_way_ring")
    else:
        tx = jaxcomm.mean("data", "cnat", "two_way_ring")
    with jax.set_mesh(make_mesh(world)):
        state = tx.init(jax.ShapeDtypeStruct((1, n), "float32"))
        grads = jax.ShapeDtypeStruct((world, 1, n), "float32")
        report = jaxcomm.wire_report(jax.jit(tx.update).lower(grads, state).compile())
    permutes = [c for c in report.collectives if c.op == "collective-permute"]
    right = [(0, 1) in c.groups for c in permutes]
    assert right == [True] * 3 + [False] * 7
    assert all((0, 1) in c.groups or (1, 0) in c.groups for c in permutes)
