"""Ends a process whose steps do not end, so that its launcher can start the run again.

If one process hangs, say while reading its data, all others wait for it in C++, where no exception
reaches them. So a thread counts the seconds since the last step ended. After the limit it says what
this process waits for, and ends it. The process that waits for its own data ends immediately, the
others a little later, so the launcher names the process that the others were waiting for.

Work that is expected to take long does not count: everything before the end of the first step, and
what the recorder's `pause` surrounds, such as a test or a checkpoint. Neither does time in which
this process was stopped (Ctrl-Z): the thread counts its own ticks.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator

from train import signals

TICK_SECONDS = 0.5
# After SIGTERM, a step has to end within this time: SLURM and Kubernetes wait no longer.
SAVE_SECONDS = 30.0
LATER_SECONDS = 10.0  # how much later processes end that wait for others
FIELD = "--config.guard.step_seconds"


class Watchdog:
    """Watches the steps between `start` and `close`.

    Args:
      seconds: how long a step may take; 0 watches only whether SIGTERM is obeyed.
      alone: whether this is the only process.

    Attributes:
      below_bar: whether a progress bar is on the current line, so that messages go below it.
    """

    def __init__(self, seconds: float = 0.0, alone: bool = True):
        self._limit = seconds
        self._usual = self._for = "its devices" if alone else "the other processes"
        self._next: int | None = None  # the step that is to end; None before the first has ended
        self._ahead = 0  # steps that were started after it
        self._pauses = 0
        self._waited = self._asked = 0.0
        self._is_said = False
        self.below_bar = False
        self._closed = threading.Event()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Ends the thread; what follows is not a step."""
        self._closed.set()

    def ended(self, step: int) -> None:
        """Notes that a step has ended; the next one has the full time."""
        self._waited = self._asked = 0.0
        self._next, self._is_said = step + 1, False

    @contextlib.contextmanager
    def at(self, what: str, ahead: int = 0) -> Iterator[None]:
        """Surrounds work that waits for something other than other processes, such as "its data".

        Args:
          what: what it waits for.
          ahead: how many steps are in flight before it.
        """
        self._for, self._ahead = what, ahead
        yield
        self._for, self._ahead = self._usual, 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Surrounds work that is not a step; after it the next step has the full time."""
        self._pauses += 1
        try:
            yield
        finally:
            self._waited = self._asked = 0.0
            self._pauses -= 1

    def _watch(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            if self._pauses:
                continue
            self._waited += TICK_SECONDS
            self._asked += TICK_SECONDS if signals.stop.is_set() else 0.0
            if self._asked > SAVE_SECONDS:
                self._say(
                    f"SIGTERM: no step has ended for {SAVE_SECONDS:g} s, so this process, which "
                    f"waits for {self._for}, could not save and ends"
                )
                signals.end(signals.ENDED + signal.SIGTERM)
            if self._next is not None and 0 < self._limit <= self._waited:
                self._late(self._next + self._ahead)

    def _late(self, step: int) -> None:
        """Says once what this process waits for, and ends it, at once or a little later."""
        if not self._is_said:
            self._is_said = True
            self._say(
                f"step {step} has not ended for {self._limit:g} s; this "
                f"process waits for {self._for}, and ends ({FIELD})"
            )
        is_waiting_for_others = self._for == self._usual
        if self._waited >= self._limit + (LATER_SECONDS if is_waiting_for_others else 0.0):
            signals.end(1)

    def _say(self, line: str) -> None:
        signals.say("\n" * self.below_bar + line)
