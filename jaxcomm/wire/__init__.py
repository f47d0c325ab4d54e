"""Reads the bytes on the wire from a compiled program.

The compiler promotes dtypes, combines collectives and adds some of its own. So a program's bytes
are read from its optimized text.
"""

import itertools
import math
import re
import warnings
from typing import Any

import jax

from jaxcomm._axes import names_in_entry
from jaxcomm._users_line import users_line
from jaxcomm.wire._hlo import CURE, parse
from jaxcomm.wire._report import Collective, WireReport

__all__ = ["Collective", "WireReport", "wire_report"]


def wire_report(compiled: Any) -> WireReport:
    """Reports how many bytes each device sends in one run of a compiled program.

    A device in a group of g is charged with what the best algorithm for long messages sends:

        all-reduce            2 (g-1)/g of its operand
        all-gather            (g-1)/g of the result
        reduce-scatter        (g-1)/g of its operand; all-to-all too
        ragged-all-to-all     its operand: a bound, as sizes are known only at run time
        collective-permute    its operand for each pair (this device, another device)
        collective-broadcast  its operand, except the last device: a pipelined chain

    What a custom call or a kernel sends does not appear in a program's text.

    Warns if the program returns the state of each device replicated, as `out_shardings` of
    `jax.jit` can ask for: it is then gathered in float32.

    Args:
        compiled: the result of `jitted.lower(*args).compile()`, or its `as_text()`.

    Returns:
        The report; print it, or read its `bytes_max`, `bytes_mean`, `rounds` and `collectives`.
        `per_step` gives the bytes of a step on average over a run.

    Raises:
        TypeError: if the argument is not a compiled program.
        ValueError: if the text is not a compiled program, or the program sends in a way not listed
            above.

    Example:
        >>> import jax, jaxcomm
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
        >>> step = jax.shard_map(lambda x: jax.lax.pmean(x, "data"),
        ...                      mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((8, 1000), "float32")).compile()
        >>> jaxcomm.wire_report(compiled).bytes_max
        7000
    """
    if not isinstance(compiled, str):
        # A Lowered has `as_text` too, but not yet the collectives that the compiler adds.
        if hasattr(compiled, "compile") or not hasattr(compiled, "as_text"):
            raise TypeError(f"{type(compiled).__name__} is not a compiled program; {CURE}.")
        _warn_of_gathered_state(getattr(compiled, "out_info", None))
        compiled = compiled.as_text() or ""
    modules = re.split("^HloModule ", compiled, flags=re.MULTILINE)[1:]
    if len(modules) != 1 or "is_scheduled=true" not in modules[0].partition("\n")[0]:
        several = f"{len(modules)} modules" if len(modules) > 1 else "something else"
        kind = "StableHLO" if "func.func" in compiled else several
        raise ValueError(f"expected one compiled HLO program, got {kind}; {CURE}.")
    header, *lines = modules[0].splitlines()
    counts = re.findall(r"(?:replica_count|num_partitions)=(\d+)", header)
    devices = math.prod(map(int, counts))
    try:
        found, branches, names = parse(lines, devices)
    except KeyError as error:
        raise ValueError(f"the program's text is cut: it lacks {error}; {CURE}.") from error
    holding = dict.fromkeys(name for c in found for name, _ in c.branch)
    conditionals = tuple((name, branches[name]) for name in holding)
    named = tuple(branch for branch in names if branch.conditional in holding)
    return WireReport(tuple(found), devices, conditionals, named)


def _warn_of_gathered_state(outputs: Any) -> None:
    """Warns if any state of each device leaves a program as equal on all of them.

    Args:
      outputs: the shapes and shardings of what the program returns.
    """

    def is_own(node: Any) -> bool:
        return getattr(node, "is_of_each_device", False)

    for node in filter(is_own, jax.tree.leaves(outputs, is_leaf=is_own)):
        if any(itertools.starmap(_is_gathered, zip(node.values, node.specs, strict=True))):
            warnings.warn(
                "the program returns state that differs from device to device, such as residuals, "
                "replicated: it is gathered in float32. For a step, leave out_shardings= of "
                "jax.jit out, or give the state jax.tree.map(lambda x: x.sharding, state).",
                stacklevel=users_line(),
            )
            return


def _is_gathered(x: Any, spec: jax.P) -> bool:
    """Whether an array is equal on all devices along an axis that its spec begins with.

    Norms of a state, or states that a loop has stacked, have its tree, and other shapes.
    """
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.NamedSharding) or not spec:
        return False  # XLA chose it
    sizes = sharding.mesh.shape
    place = next((i for i, entry in enumerate(spec) if entry), 0)  # behind an axis of layers
    own = names_in_entry(spec[place])
    devices = math.prod(sizes.get(name, 1) for name in own)
    if devices == 1 or len(x.shape) < len(spec) or x.shape[place] != devices:
        return False
    kept = itertools.chain.from_iterable(map(names_in_entry, sharding.spec))
    return set(own).isdisjoint(kept)
