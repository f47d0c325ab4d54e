"""Where the time of a run goes: every moment between two lines belongs to one part."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator


class Split:
    """Adds up seconds by name.

    A step has two parts: "input", in which devices may have waited for a batch, and "step", the
    rest. Work between steps has its own parts, such as "test" and "checkpoint".
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._steps = 0

    def step(self, seconds: float, waited: float) -> None:
        """Counts a step and its part that was spent waiting for input."""
        self._steps += 1
        self._seconds["input"] += min(waited, seconds)
        self._seconds["step"] += max(seconds - waited, 0.0)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Surrounds work between steps."""
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started

    def line(self, compute_ms: float | None = None) -> dict[str, float]:
        """Returns milliseconds per step since the last line, by `NAME_ms`, and starts anew.

        Args:
          compute_ms: the time of a step without its exchange, if it was measured. The rest of the
            step is then `exchange_ms`, or 0 where that is within noise.

        Returns:
          The parts and the number of `steps`; nothing if there was no step.
        """
        if not self._steps:
            return {}
        parts = {f"{name}_ms": 1e3 * s / self._steps for name, s in self._seconds.items()}
        if compute_ms is not None:
            rest = max(parts["step_ms"] - compute_ms, 0.0)
            parts |= {"compute_ms": compute_ms, "exchange_ms": rest}
        found = {"steps": self._steps, **parts}
        self._seconds.clear()
        self._steps = 0
        return found
