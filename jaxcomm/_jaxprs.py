"""Where the values of a jaxpr come from."""

from collections.abc import Iterable
from typing import Any

from jax.extend.core import Literal

_ALIKE = {"copy", "name", "optimization_barrier", "reshard", "sharding_constraint", "pvary"}


def origin_of(jaxpr: Any, variable: Any) -> Any:
    """The first variable that holds the same value: through calls, and scans that pass it on."""
    made = {id(out): (line, i) for line in jaxpr.eqns for i, out in enumerate(line.outvars)}
    while id(variable) in made:
        source = _source(*made[id(variable)])
        if source is None:
            break
        variable = source
    return variable


def _source(line: Any, place: int) -> Any:
    """The operand of an equation that a result of it equals, or None."""
    if line.primitive.name in _ALIKE:
        return line.invars[place]
    inside = next((line.params[x] for x in ("jaxpr", "call_jaxpr") if x in line.params), None)
    inside = getattr(inside, "jaxpr", inside)
    if inside is None or len(inside.invars) != len(line.invars):
        return None
    origin = origin_of(inside, inside.outvars[place])
    found = [i for i, x in enumerate(inside.invars) if x is origin]
    if not found or isinstance(origin, Literal):
        return None
    if line.primitive.name == "scan":
        # Of [constants, carry, slices] it returns [carry, slices]; each turn has to pass it on.
        first, carried = line.params["num_consts"], line.params["num_carry"]
        is_passed = found[0] == first + place if place < carried else found[0] >= first + carried
        return line.invars[found[0]] if is_passed else None
    return line.invars[found[0]]


def needed_for(jaxpr: Any, outs: Iterable[Any]) -> set[int]:
    """The ids of the variables that some results of a jaxpr are computed from, and theirs."""
    needed = set(map(id, outs))
    for line in reversed(jaxpr.eqns):
        if needed.intersection(map(id, line.outvars)):
            needed.update(map(id, line.invars))
    return needed


def position_of(jaxpr: Any, var: Any) -> tuple[int, ...]:
    """The equation that makes a value, past those with one operand; then the one inside it."""
    maker = {id(out): i for i, eqn in enumerate(jaxpr.eqns) for out in eqn.outvars}
    while (at := maker.get(id(var), -1)) >= 0:
        eqn = jaxpr.eqns[at]
        if "jaxpr" in eqn.params:  # a jitted function, a scan
            inner = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
            made = [out is var for out in eqn.outvars].index(True)
            return (at, *position_of(inner, inner.outvars[made]))
        if len(eqn.invars) != 1:
            break
        var = eqn.invars[0]
    return (at,)
