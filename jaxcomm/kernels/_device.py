"""What the device can do that code is traced for: the one place that decides about kernels.

That device is `jax.default_device` where it is set, else the first of the default backend. To
compile for a device that is not there, set it.
"""

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

    It compiles plain loads and stores for capability 9.0 on every jax that is supported, and for
    8.0 and more from jax 0.11 on. Older devices would do too, but nothing is tested on them.
    """
    needed = (8, 0) if _compat.jax_version() >= (0, 11) else (9, 0)
    found = capability()
    if found is None or found < needed:
        here = "no NVIDIA GPU" if found is None else f"capability {found[0]}.{found[1]}"
        raise NotImplementedError(
            f'{name}: the implementation "mosaic" needs compute capability {needed[0]}.{needed[1]} '
            f'or more with this jax, and there is {here}; use "xla" or None.'
        )


def choose(name: str, implementation: str | None, available: tuple[str, ...], elements: int) -> str:
    """The implementation to run for so many elements.

    None is "xla" on every device. Most operations XLA reads and writes once; of some the kernels
    move half as much, but only a measurement can be a reason for another choice, and there is none:
    these kernels are compiled for GPUs and interpreted on CPU, and have never been timed.

    Raises:
      ValueError: for "mosaic" with more than 2^31 - 1 elements, which its indices do not reach.
      NotImplementedError: for an implementation that does not exist, or not for this device.
    """
    if implementation is None:
        return "xla"
    if implementation not in available:
        quoted = ", ".join(f'"{a}"' for a in available)
        raise NotImplementedError(
            f"{name} has no implementation {implementation!r}; use {quoted} or None."
        )
    if implementation == "mosaic":
        if elements > MOST_ELEMENTS:
            raise ValueError(
                f'{name}: the implementation "mosaic" takes at most 2^31 - 1 elements, got '
                f'{elements}; cut the array, or use "xla" or None.'
            )
        require_mosaic(name)
    return implementation
