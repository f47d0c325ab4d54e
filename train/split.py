"""Where the time of a run goes: every moment between two lines belongs to one part."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator


class Split:
    """Adds up seconds by name.

    Steps are two parts: "input", in which devices may have waited for a batch, and "step", the
    rest. Work between steps has parts of its own, such as "test" and "checkpoint".
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
        """Milliseconds a step since the line before, by `NAME_ms`, and begins anew.

        Args:
          compute_ms: of a step without its exchange, where it was measured: then the rest of the
            step is `exchange_ms`, and 0 where that is within noise.

        Returns:
          The parts and how many `steps` they are of; nothing if there was none.
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
