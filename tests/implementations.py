"""All implementations of an operation, for tests that hold for each of them."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest


def every_implementation(f: Callable[..., Any]) -> pytest.MarkDecorator:
    """The argument f of a test: the plain version; the Mosaic kernel, interpreted; and on a GPU."""
    mosaic = functools.partial(f, implementation="mosaic")
    return pytest.mark.parametrize(
        "f",
        [
            pytest.param(functools.partial(f, implementation="xla"), id="xla"),
            pytest.param(interpreted(f), id="mosaic, interpreted"),
            pytest.param(mosaic, id="mosaic", marks=pytest.mark.gpu),
        ],
    )


def interpreted(f: Callable[..., Any]) -> Callable[..., Any]:
    """The Mosaic kernel of an operation, on CPU: what has its name in `mosaic` of its package."""

    def run(*args: Any) -> Any:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if not hasattr(plgpu, "InterpretGPUParams"):
            pytest.skip("this jax has no interpreter of Mosaic GPU kernels; the newest has")
        package = ".".join(f.__module__.split(".")[:3])  # jaxcomm.kernels.<op>
        kernel = getattr(importlib.import_module(f"{package}.mosaic"), f.__name__)
        return kernel(*args, interpret=plgpu.InterpretGPUParams())

    return run
