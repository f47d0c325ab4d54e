"""All implementations of an operation, for tests that hold for each of them."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest


def every_implementation(f: Callable[..., Any], kernel: str = "mosaic") -> pytest.MarkDecorator:
    """The argument f of a test: the plain version; the kernel, interpreted; and on a GPU.

    The kernel is "mosaic" or "triton".
    """
    compiled = functools.partial(f, implementation=kernel)
    return pytest.mark.parametrize(
        "f",
        [
            pytest.param(functools.partial(f, implementation="xla"), id="xla"),
            pytest.param(interpreted(f, kernel), id=f"{kernel}, interpreted"),
            pytest.param(compiled, id=kernel, marks=pytest.mark.gpu),
        ],
    )


def interpreted(f: Callable[..., Any], kernel: str = "mosaic") -> Callable[..., Any]:
    """The kernel of an operation, on CPU: what has its name in `mosaic` or `triton` beside it."""

    def run(*args: Any) -> Any:
        package = ".".join(f.__module__.split(".")[:3])  # jaxcomm.kernels.<op>
        g = getattr(importlib.import_module(f"{package}.{kernel}"), f.__name__)
        return g(*args, interpret=True if kernel == "triton" else _mosaic_parameters())

    return run


def _mosaic_parameters() -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip("this jax has no interpreter of Mosaic GPU kernels; the newest has")
    return plgpu.InterpretGPUParams()
