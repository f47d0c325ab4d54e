"""What the device can do that code is traced for: the one place that decides about kernels.

That device is `jax.default_device` where it is set, else the first of the default backend. To
compile for a device that is not there, set it.
"""

from importlib.util import find_spec
from typing import Any

import jax

from jaxcomm import _compat

MOST_ELEMENTS = 2**31 - 1  # kernels count in int32


def capability() -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU, such as (9, 0); None on anything else."""
    device: Any = getattr(jax.config, "jax_default_device", None)
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    found = str(getattr(device, "compute_capability", ""))
    major, _, minor = found.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def require_mosaic(name: str) -> None:
    """Raises a NotImplementedError where Mosaic GPU has no kernel for the device.

    It compiles plain loads and stores for capability 9.0 from jax 0.10.2 on, which is the first
    that has shifts, and for 8.0 and more from jax 0.11 on. Older devices would do too, but nothing
    is tested on them.
    """
    version = _compat.jax_version()
    if version < (0, 10, 2):
        raise NotImplementedError(
            f'{name}: the implementation "mosaic" needs jax 0.10.2 or newer, and this is '
            f'{".".join(map(str, version))}; use "xla" or None.'
        )
    _require(name, "mosaic", (8, 0) if version >= (0, 11) else (9, 0))


def require_triton(name: str) -> None:
    """Raises a NotImplementedError where Pallas has no Triton kernel for the device.

    From jax 0.11 on it warns that Triton will be taken out of Pallas.
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


def choose(name: str, implementation: str | None, available: tuple[str, ...], elements: int) -> str:
    """The implementation to run for so many elements.

    None is "xla" on every device. Most operations XLA reads and writes once; of some the kernels
    move half as much, but only a measurement can be a reason for another choice, and there is none:
    these kernels are compiled for GPUs and interpreted on CPU, and have never been timed.

    Raises:
      ValueError: for more than 2^31 - 1 elements, which the indices of a kernel do not reach.
      NotImplementedError: for an implementation that does not exist, or not for this device.
    """
    if implementation is None:
        return "xla"
    if implementation not in available:
        quoted = ", ".join(f'"{a}"' for a in available)
        raise NotImplementedError(
            f"{name} has no implementation {implementation!r}; use {quoted} or None."
        )
    if implementation != "xla":
        if elements > MOST_ELEMENTS:
            raise ValueError(
                f'{name}: the implementation "{implementation}" takes at most 2^31 - 1 elements, '
                f'got {elements}; cut the array, or use "xla" or None.'
            )
        (require_mosaic if implementation == "mosaic" else require_triton)(name)
    return implementation
