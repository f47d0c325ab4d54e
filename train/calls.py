"""Options in a config field: a name with arguments, written as in Python."""

import ast
from collections.abc import Callable, Mapping
from typing import Any

from train.errors import UserError, choose


def read_call(text: Any, factories: Mapping[str, Callable[..., Any]], field: str) -> Any:
    """The object that a call such as `qsgd(levels=7)` makes; a name alone is returned unchanged.

    Args:
      text: the value of the field; anything but a string is returned unchanged. The arguments of a
        call are named; each is a number, a string, a tuple or a call.
      factories: what may be named or called, by name.
      field: the name of the field, for messages.

    Raises:
      UserError: if the text cannot be read, there is no such factory, or it refuses the arguments.
    """
    if not isinstance(text, str):
        return text
    if text[:1] in ("'", '"'):
        bare = text.strip("'\"")
        raise UserError(f"{field}: {text} contains quotes; leave them out: --{field}='{bare}'")
    if "(" not in text:
        choose(factories, text, field)
        return text
    try:
        (statement,) = ast.parse(text.strip()).body
        expression = getattr(statement, "value", None)
        return _made(expression, factories, field)
    except (SyntaxError, TypeError, ValueError) as error:
        raise UserError(f"{field}: {text!r}: {error}") from error


def _made(node: Any, factories: Mapping[str, Callable[..., Any]], field: str) -> Any:
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    if not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("expected a name with named arguments, such as qsgd(levels=7)")
    factory = choose(factories, node.func.id, field)
    return factory(**{str(k.arg): _made(k.value, factories, field) for k in node.keywords})
