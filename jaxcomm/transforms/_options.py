"""Options that name leaves, or are functions: checked when a transformation is made."""

import collections
import fnmatch
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jaxcomm import _axes
from jaxcomm._axes import AxisName

# Which leaves travel in float32: patterns in addition to the default rule, or a rule instead of it.
Exempt = Sequence[str] | Callable[[str, tuple[int, ...]], bool]


def fits(path: str, patterns: Sequence[str]) -> bool:
    """Whether a path fits one of the patterns.

    `path_name` leaves out the `.value` of a Flax variable, and cannot tell it from a field `value`
    of another class: so `attn` also fits "attn/value" and "attn/*".
    """
    spelled = path, f"{path}/value", f"{path}/*"
    return any(p in spelled or fnmatch.fnmatchcase(path, p) for p in patterns)


def check_names(axis_name: AxisName, exempt: Exempt, bucket_order: Sequence[str] | None) -> None:
    """Raises, when a transformation is made, unless these are names or lists of names.

    `exempt` may also be a function.
    """
    _axes.names_of(axis_name)
    if callable(exempt):
        require_call(exempt, "exempt", "path", "shape")
    else:
        require_strings(exempt, "exempt", "patterns")
    if bucket_order is not None:
        if not isinstance(bucket_order, Sequence):
            raise TypeError(f"bucket_order must be a list of paths, got {bucket_order!r}.")
        require_strings(bucket_order, "bucket_order", "paths")
        if twice := [path for path, n in collections.Counter(bucket_order).items() if n > 1]:
            raise ValueError(f"bucket_order names {twice[0]!r} twice; it names each path once.")


_EACH = (
    " Give each part the patterns of its own leaves; where one exchange has several parts, as the "
    "fragments of local_steps, let exempt be a function of path and shape."
)


def require_call(f: Callable[..., Any], name: str, *arguments: str) -> None:
    """Raises a TypeError for an option that is a plain function of other arguments."""
    if not inspect.isfunction(f):  # a jitted one has the signature of what it wraps
        return
    try:
        inspect.signature(f, follow_wrapped=False).bind(*arguments)
    except TypeError as error:
        wanted = ", ".join(arguments)
        raise TypeError(f"{name} is called as {name}({wanted}), and {f!r} {error}.") from error


def require_strings(given: Any, name: str, what: str) -> None:
    """Raises a TypeError for what is not a list of strings: a string, None, a number."""
    if isinstance(given, str):
        raise TypeError(f"{name} must be a list of {what}, got {given!r}; write [{given!r}].")
    if not isinstance(given, Collection) or not all(isinstance(x, str) for x in given):
        raise TypeError(f"{name} must be a list of {what}, got {given!r}.")


def check_patterns(
    patterns: Sequence[str], paths: Sequence[str], what: str = "exempt", is_part: bool = False
) -> None:
    """Raises for a string in place of a list, and for a pattern that matches no path.

    Also in a part of `optax.partition`: a misspelt pattern would exempt nothing, silently.
    """
    require_strings(patterns, what, "patterns")
    for pattern in patterns:
        if not any(fits(path, [pattern]) for path in paths):
            raise ValueError(
                f"{what} names {pattern!r}, which fits no parameter"
                f"{' of this part of the tree' if is_part else ''}; the paths are "
                f"{', '.join(paths[:10])}{', ...' if len(paths) > 10 else ''}."
                f"{_EACH if is_part else ''}"
            )


def check_order(order: Sequence[str], paths: Sequence[str], is_part: bool) -> None:
    """Raises for a name that is not a path; a part of `optax.partition` may be given all paths."""
    wrong = [] if is_part else [name for name in order if name not in paths]
    if wrong:
        raise ValueError(
            f"bucket_order names {wrong[0]!r}, which is not a parameter; the paths are "
            f"{', '.join(paths[:10])}{', ...' if len(paths) > 10 else ''}. "
            "jaxcomm.backward_order finds the order."
        )
