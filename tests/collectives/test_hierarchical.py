"""Two algorithms on two mesh axes."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxcomm
from algorithm_table import CASES, mean_on_all, mean_program
from jaxcomm import codecs
from jaxcomm.collectives import algorithms
from jaxcomm.plan.exchanges import Exchange


@pytest.mark.parametrize("near", ["ring", "halving_doubling", "direct"])
def test_means_are_exact(mesh4x2: Mesh, near: str) -> None:
    x = np.random.default_rng(0).integers(-64, 64, (8, 37)).astype(np.float32) * 8
    algorithm = algorithms.hierarchical(near=CASES[near].of(2), far=algorithms.circulant())
    program = mean_program(mesh4x2, 37, codec="float32", algorithm=algorithm)
    np.testing.assert_array_equal(mean_on_all(program, x), x.mean(0))


def test_rounding_on_both_levels_is_independent() -> None:
    """One device's 1.5 is rounded on its way, to 1 or 2, half near and a quarter far; 0 is not."""
    kinds, n = (AxisType.Auto, AxisType.Auto), 256
    mesh = jax.make_mesh((2, 2), ("far", "near"), kinds, devices=jax.devices()[:4])
    algorithm = algorithms.hierarchical(near=algorithms.ring(), far=algorithms.ring())
    program = mean_program(mesh, n, codec=codecs.cnat(), second_hop="float32", algorithm=algorithm)
    x = np.zeros((4, n), np.float32)
    x[0] = 1.5
    sums = 4 * mean_on_all(program, x).reshape(4, -1)
    (far,) = [q for q in range(4) if set(sums[q]) == {1, 2} and 1.5 in sums[q ^ 1]]
    assert set(sums[far ^ 1]) == {1.5}  # the block that the device owns
    for near in {0, 1, 2, 3} - {far, far ^ 1}:
        assert set(sums[near]) == {1, 2}
        assert 0.2 < (sums[near] == sums[far]).mean() < 0.8


@pytest.mark.parametrize("near", ["ring", "direct"])
def test_a_near_axis_of_one_device_rounds_nothing(near: str) -> None:
    """With bits that the far exchange draws too, a mean would not be right on average."""
    kinds, n = (AxisType.Auto, AxisType.Auto), 512
    mesh = jax.make_mesh((4, 1), ("far", "near"), kinds, devices=jax.devices()[:4])
    alone = jax.make_mesh((4,), ("data",), kinds[:1], devices=jax.devices()[:4])
    x = np.random.default_rng(0).standard_normal((4, n)).astype(np.float32)
    algorithm = algorithms.hierarchical(near=CASES[near].of(1), far=algorithms.direct())
    both = mean_program(mesh, n, codec="qsgd", algorithm=algorithm)
    far = mean_program(alone, n, codec="qsgd", algorithm="direct")
    np.testing.assert_array_equal(mean_on_all(both, x), mean_on_all(far, x))


@pytest.mark.parametrize("codec", ["int4", "scaled_sign"])
def test_residuals_of_hosts_take_no_memory_of_their_own(mesh8: Mesh, codec: str) -> None:
    """What is added up in float32 leaves no errors, so none are computed of the whole vector."""
    kinds = {"near": algorithms.direct(), "far": algorithms.direct(), "near_codec": "float32"}

    by_hosts = algorithms.hierarchical(**kinds, devices_per_host=4)
    tx = jaxcomm.mean("data", codec, by_hosts, bucket_mib=1, error_feedback=True)
    with jax.set_mesh(mesh8):
        exchange = Exchange(mesh8, "data", tx, [(1024, 256)] * 6)
        memory = exchange.lower().compile().memory_analysis()
    gradients = 6 * 4 * 1024 * 256
    assert memory.temp_size_in_bytes < 1.1 * gradients


def test_the_axes_are_two_and_the_algorithms_have_a_reduce_scatter(mesh8: Mesh) -> None:
    for near in algorithms.native(), "native", "two_clusters", "rinng":
        with pytest.raises(TypeError, match=r"for each axis, one of direct.*ring\(\), got "):
            algorithms.hierarchical(near=near, far=algorithms.ring())
    with pytest.raises(TypeError, match=r"write jaxcomm.algorithms.circulant\(\)"):
        algorithms.hierarchical(near=algorithms.ring(), far="circulant")
    algorithm = algorithms.hierarchical(near=algorithms.ring(), far=algorithms.ring())
    with pytest.raises(ValueError, match="needs two mesh axes"):
        mean_program(mesh8, 8, algorithm=algorithm)


@pytest.mark.parametrize("codec", ["float16", "int2", "random_k"])
def test_what_near_links_do_not_take(codec: str) -> None:
    direct = algorithms.direct()
    with pytest.raises(ValueError, match=f"near_codec is for fast links and cannot be {codec}"):
        algorithms.hierarchical(near=direct, far=direct, near_codec=codec)
