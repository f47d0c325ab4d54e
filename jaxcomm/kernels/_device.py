"""The device that code is traced for, and the kernels that it can run.

This is `jax.default_device` if it is set, otherwise the first local device of the default backend.
To compile for a device that is not present, set `jax.default_device`.
"""

from importlib.util import find_spec
from typing import Any

import jax

from jaxcomm import _compat


def current() -> Any:
    """The device that code is traced for."""
    device: Any = getattr(jax.config, "jax_default_device", None)
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return device


def is_between_cpu_processes() -> bool:
    """Whether collectives travel by gloo: several processes, whose devices are CPUs."""
    return jax.process_count() > 1 and current().platform == "cpu"


def capability() -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU, such as (9, 0); None on anything else."""
    found = str(getattr(current(), "compute_capability", ""))
    major, _, minor = found.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def require_mosaic(name: str) -> None:
    """Raises a NotImplementedError where Mosaic GPU has no kernel for the device.

    Mosaic GPU compiles plain loads and stores for capability 9.0 and more, and from jax 0.11 on for
    8.0 and more. It compiles them for older devices too, but no test covers those.
    """
    _require(name, "mosaic", (8, 0) if _compat.jax_version() >= (0, 11) else (9, 0))


def require_triton(name: str) -> None:
    """Raises a NotImplementedError where Pallas has no Triton kernel for the device.

    From jax 0.11 on, Pallas warns that it will drop Triton.
    """
    if find_spec("jax.experimental.pallas.triton") is None:
        raise NotImplementedError(
            f'{name}: this jax has no Triton in Pallas, which the implementation "triton" needs; '
            'use "xla" or None.'
        )
    _require(name, "triton", (8, 0))


def _require(name: str, implementation: str, needed: tuple[int, int]) -> None:
    found = capability()
    if found is None or found < needed:
        here = "no NVIDIA GPU" if found is None else f"capability {found[0]}.{found[1]}"
        raise NotImplementedError(
            f'{name}: the implementation "{implementation}" needs compute capability {needed[0]}.'
            f'{needed[1]} or more with this jax, and there is {here}; use "xla" or None.'
        )
