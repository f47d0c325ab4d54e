"""The stride of `random_k`, and what it refuses."""

import pytest

from jaxcomm import codecs


@pytest.mark.parametrize(("density", "stride"), [(0.15, 7), (0.4, 2), (1.0, 1), (0.01, 100)])
def test_the_stride_is_the_nearest_to_one_over_the_density(density: float, stride: int) -> None:
    assert codecs.random_k(density).stride == stride


def test_values_have_the_range_of_float32() -> None:
    """Values are multiplied by the stride, which overflows float16."""
    with pytest.raises(TypeError, match="a codec of float32's range"):
        codecs.random_k(0.1, codecs.float16())


def test_the_least_density() -> None:
    with pytest.raises(ValueError, match=r"at least 2\^-30"):
        codecs.random_k(2**-31)
