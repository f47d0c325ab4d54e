"""Refuses optax wrappers that would break a synchronised step, and names the cure."""

import sys

_CURES = {
    "apply_if_finite": (
        "optax.apply_if_finite looks at local gradients, so devices would disagree. Put it around "
        "the optimizer only: optax.chain(jaxcomm.mean(...), optax.apply_if_finite(optimizer)). "
        "A non-finite gradient on any device makes jaxcomm's update NaN on all of them."
    ),
    "MultiSteps": (
        "optax.MultiSteps keeps one accumulator for all devices, but gradients are local before "
        "they are exchanged. Use jaxcomm.multi_steps(inner, every)."
    ),
}


def refuse_wrappers() -> None:
    """Raises if an optax wrapper that cannot work is calling.

    The dtype of local gradients refuses these too, but cannot name the cure. A wrapper hides what
    it does from the transformation inside it, so this asks the call stack, at trace time only.

    Raises:
      ValueError: with the cure.
    """
    for wrapper in _CURES.keys() & _optax_callers():
        raise ValueError(_CURES[wrapper])


def _optax_callers() -> set[str]:
    """The outermost names of the optax functions on the call stack: "masked", "chain", ..."""
    names = set()
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("optax."):
            names.add(frame.f_code.co_qualname.split(".")[0])
        frame = frame.f_back
    return names
