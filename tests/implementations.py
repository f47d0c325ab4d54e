"""All implementations of an operation, for tests that hold for each of them."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from jaxcomm.kernels import _device

# Where a folder has several kernels of one name.
OWN_MODULES = {"jaxcomm.kernels.powers_of_two.window": "window_mosaic"}


Given = Callable[..., tuple[Any, ...]]


def every_implementation(
    f: Callable[..., Any], kernel: str = "mosaic", given: Given | None = None
) -> pytest.MarkDecorator:
    """Parametrizes f: the plain version; the kernel, interpreted; and both on a GPU.

    Args:
      f: an operation.
      kernel: "mosaic" or "triton".
      given: what the function of the kernel takes in place of f's arguments; None if the same.
    """
    plain = functools.partial(f, implementation="xla")
    return pytest.mark.parametrize(
        "f",
        [
            pytest.param(plain, id="xla"),
            pytest.param(interpreted(f, kernel, given), id=f"{kernel}, interpreted"),
            pytest.param(plain, id="xla on GPU", marks=pytest.mark.gpu),
            pytest.param(compiled(f, kernel), id=f"{kernel} on GPU", marks=pytest.mark.gpu),
        ],
    )


def compiled(f: Callable[..., Any], kernel: str) -> Callable[..., Any]:
    """An operation as its kernel, where the device has it."""

    def run(*args: Any) -> Any:
        require = {"mosaic": _device.require_mosaic, "triton": _device.require_triton}[kernel]
        try:
            require(f.__name__)
        except NotImplementedError as error:
            pytest.skip(str(error))
        return f(*args, implementation=kernel)

    return run


def interpreted(
    f: Callable[..., Any], kernel: str = "mosaic", given: Given | None = None
) -> Callable[..., Any]:
    """The kernel of an operation, on CPU: the function of its name in the same folder's module."""

    def run(*args: Any) -> Any:
        package = ".".join(f.__module__.split(".")[:3])  # jaxcomm.kernels.<op>
        module = f"{package}.{OWN_MODULES.get(f.__module__, kernel)}"
        g = getattr(importlib.import_module(module), f.__name__)
        args = given(*args) if given else args
        return g(*args, interpret=True if kernel == "triton" else _mosaic_parameters())

    return run


def _mosaic_parameters() -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip("this jax has no interpreter of Mosaic GPU kernels; the newest has")
    return plgpu.InterpretGPUParams()
