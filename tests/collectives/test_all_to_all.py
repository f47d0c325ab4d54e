"""The all-to-all of CPU processes: rounds that keep both directions of every link busy."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxcomm.collectives import _all_to_all


@pytest.mark.parametrize("world", [*range(3, 41), 48, 64, 96])
def test_every_message_once_and_no_pair_both_ways(world: int) -> None:
    parts, rounds = _all_to_all.rounds_for(world)
    sent = [(r, *message) for row in rounds for r, message in enumerate(row)]
    everything = {
        (r, s, p) for r in range(world) for s in range(world) for p in range(parts) if r != s
    }
    assert len(sent) == len(everything) and set(sent) == everything
    for row in rounds:
        targets = [target for target, _ in row]
        assert sorted(targets) == list(range(world))
        assert all(targets[targets[r]] != r for r in range(world))
    assert len(rounds) == (6 if world == 4 else world - 1)


def test_many_devices_have_one_slow_round() -> None:
    _, rounds = _all_to_all.rounds_for(128)
    slow = [row for row in rounds if any(row[row[r][0]][0] == r for r in range(128))]
    assert len(rounds) == 127 and len(slow) == 1


@pytest.mark.parametrize("world", [3, 4, 6, 8])
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3)])
def test_it_is_an_all_to_all(
    make_mesh: Callable[[int], Mesh], world: int, shape: tuple[int, ...]
) -> None:
    x = np.arange(world * world * np.prod(shape), dtype=np.uint16).reshape(world, world, *shape)
    f = jax.shard_map(
        lambda x: _all_to_all.by_rounds(x[0], "data")[None],
        mesh=make_mesh(world),
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(f)(jnp.asarray(x)), x.swapaxes(0, 1))


def test_over_axes_in_another_order_than_the_mesh_has(mesh4x2: Mesh) -> None:
    axes = ("model", "data")
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    f = jax.shard_map(
        lambda x: _all_to_all.by_rounds(x[0], axes)[None],
        mesh=mesh4x2,
        in_specs=PartitionSpec(axes),
        out_specs=PartitionSpec(axes),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(f)(x), x.T)
