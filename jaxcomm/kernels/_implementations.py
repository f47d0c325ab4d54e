"""Which implementations each operation has, and which of them runs.

An option selects the implementation. It is None, the name of an implementation, "measure", or a
mapping from operations to these:

    None                                             the fastest where it was timed, or "xla"
    "mosaic"                                         this one, for every operation
    "measure"                                        the fastest on this device, see `_measure`
    {"integers.encode": "mosaic",
     "select.compact": "triton"}                     one for each; None for those not in it

None means the implementation that was fastest on GPUs of the device's compute capability
(`_fastest`), if one was timed and the device can run it, and "xla" otherwise.

A named implementation never falls back to another one. If the device lacks it, a
NotImplementedError is raised; if the operation does, `check` raises a ValueError before anything is
traced.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm.kernels import _device, _fastest, _measure

OPERATIONS: dict[str, tuple[str, ...]] = {
    "cnat.encode": ("xla", "mosaic"),
    "fp8.encode": ("xla", "mosaic"),
    "integers.encode": ("xla", "mosaic"),
    "nine_bits.decode_and_sum": ("xla", "mosaic"),
    "nine_bits.encode": ("xla", "mosaic"),
    "select.compact": ("xla", "triton"),
}
PLAIN, MEASURE = "xla", "measure"  # every operation has these two
MOST_ELEMENTS = 2**31 - 1  # kernels index in int32
_NAMES = (PLAIN, "mosaic", "triton", MEASURE)

Pairs = tuple[tuple[str, str | None], ...]
Option = str | Mapping[str, str | None] | Pairs | None

_REQUIREMENTS = {"mosaic": _device.require_mosaic, "triton": _device.require_triton}


def check(option: Option, operations: Sequence[str], method: str) -> str | Pairs | None:
    """Checks an option for a method, before anything is traced.

    Args:
      option: what the user passed as `implementation=`.
      operations: the operations that the method uses, names from OPERATIONS.
      method: what the user calls the method, for messages.

    Returns:
      The option in a hashable form: a mapping becomes a sorted tuple of pairs.

    Raises:
      TypeError: if the option is neither None, a string nor a mapping.
      ValueError: for an unknown implementation or operation, for an operation that the method does
        not use, and for an implementation that one of its operations does not have. "xla" and
        "measure" are valid for every method.
    """
    option = _pairs(option)
    if option is None:
        return None
    if not operations and option not in (PLAIN, MEASURE):
        raise ValueError(f"{method} has only the plain version; leave out implementation=.")
    named = ((each, option) for each in operations) if isinstance(option, str) else option
    for operation, name in named:
        if name not in (None, *_NAMES):
            raise ValueError(
                f"unknown implementation {name!r}; choose one of {_listed(_NAMES)} or None."
            )
        if operation not in operations:
            raise ValueError(
                f'implementation= names "{operation}", which {method} does not use; '
                f"its operations are {_listed(operations)}."
            )
        if name not in (None, MEASURE, *OPERATIONS[operation]):
            raise ValueError(_lacks(method, operations, operation, str(name)))
    return option


def call(
    operation: str,
    option: Option,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    elements: int,
    static: tuple[Any, ...] = (),
    sample: Callable[[np.random.Generator], tuple[Any, ...]] | None = None,
) -> Any:
    """Runs an operation by one of its implementations.

    Args:
      operation: its name in OPERATIONS.
      option: see the module docstring.
      run: takes the name of an implementation, then `args`.
      args: arrays and pytrees of arrays.
      elements: the largest number that a kernel would index.
      static: the options that `run` is bound to, other than sizes; part of the shape class.
      sample: makes arguments like `args` to measure with; None makes random ones.

    Returns:
      What `run` returns.

    Raises:
      ValueError: for more elements than an implementation can index.
      NotImplementedError: for an implementation that does not exist, or not for this device.
    """
    name = choose(operation, option, elements)
    if name not in (PLAIN, MEASURE) and _named(operation, option) is None:
        # The default device may be a GPU while the program is for a CPU beside it.
        ways = {"cuda": functools.partial(run, name), "default": functools.partial(run, PLAIN)}
        try:
            return jax.lax.platform_dependent(*args, **ways)
        except NotImplementedError:  # arguments that it does not support, such as too many messages
            name = PLAIN
    if elements == 0:
        name = PLAIN  # kernels have no program for empty arrays
    if name == MEASURE:
        names = [n for n in OPERATIONS[operation] if _is_available(operation, n, elements)]
        name = _measure.fastest(operation, names, run, args, static, sample)
    return run(name, *args)


def choose(operation: str, option: Option, elements: int) -> str:
    """The implementation that an option names for an operation, or "measure".

    Raises:
      ValueError, NotImplementedError: as `call`.
    """
    name = _named(operation, option)
    if name is None:
        name = _fastest.fastest(operation, elements)
        return name if name and _is_available(operation, name, elements) else PLAIN
    if name not in (MEASURE, *OPERATIONS[operation]):
        known = _listed((*OPERATIONS[operation], MEASURE))
        raise NotImplementedError(
            f"{operation} has no implementation {name!r}; use {known} or None."
        )
    if name not in (PLAIN, MEASURE):
        if elements > MOST_ELEMENTS:
            raise ValueError(
                f'{operation}: the implementation "{name}" takes at most 2^31 - 1 elements, '
                f'got {elements}; cut the array, or use "xla" or None.'
            )
        if name in _REQUIREMENTS:
            _REQUIREMENTS[name](operation)
    return name


def _named(operation: str, option: Option) -> str | None:
    """The part of an option that is for an operation."""
    option = _pairs(option)
    return option if option is None or isinstance(option, str) else dict(option).get(operation)


def _is_available(operation: str, name: str, elements: int) -> bool:
    try:
        choose(operation, name, elements)
    except (NotImplementedError, ValueError):
        return False
    return True


def _pairs(option: Option) -> str | Pairs | None:
    """The option, where a mapping is a sorted tuple of pairs; raises for anything else."""
    if option is None or isinstance(option, str):
        return option
    try:
        pairs = tuple(sorted(dict(option).items()))
    except (TypeError, ValueError):
        raise TypeError(
            "implementation must be None, a name, or a mapping from operations to names such as "
            f'{{"integers.encode": "mosaic"}}, got {option!r}.'
        ) from None
    for operation, _ in pairs:
        if operation not in OPERATIONS:
            raise ValueError(
                f"implementation= names an unknown operation {operation!r}; "
                f"the known ones are {_listed(OPERATIONS)}."
            )
    return pairs


def _lacks(method: str, operations: Sequence[str], operation: str, name: str) -> str:
    """The message about an operation that does not have an implementation."""
    have = "; ".join(f"{each} has {_listed(OPERATIONS[each])}" for each in operations)
    mapping = ", ".join(
        f'"{each}": "{name if name in OPERATIONS[each] else PLAIN}"' for each in operations
    )
    return (
        f"{method}: {operation} has no implementation {name!r}. {have}. "
        f"Name one for each: implementation={{{mapping}}}."
    )


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)
