"""The compiled training steps of a run: one, or one for its dense steps and one for the others."""

from typing import Any

import jaxcomm
from train import measure, sync, watched
from train.run import Run
from train.state import TrainState


class Programs:
    """What is compiled, when it is made. One program would exchange in a conditional.

    Nothing overlaps with what is in a conditional. 1-bit Adam's state tells when its dense steps
    end: steps that were not finite do not count, and what is frozen stays so in a longer run.

    Args:
      run: the run.
      now: its state at the beginning, or at its last checkpoint.
      steps: the length of the run.

    Attributes:
      by_kind: the programs of the steps that are still to come, by whether they are dense; None is
        one for all.
    """

    def __init__(self, run: Run, now: TrainState, steps: int):
        self._run, self._steps = run, steps
        self._last_dense = sync.last_dense(run.sync, steps)
        self._asks_state = run.sync.method == "one_bit_adam"
        self._is_over = self._asks_state and watched.step_of(now.opt_state) > 0
        kinds = [self._kind(min(int(now.step) + 1, steps)), self._kind(steps)]
        if self._asks_state and self._last_dense is not None and not self._is_over:
            kinds.append(True)  # also behind the last one, until so many were finite
        self.by_kind: dict[bool | None, Any] = {}
        for kind in dict.fromkeys(kinds):
            said = {} if kind is None else {"dense": kind}
            self.by_kind[kind] = run.compile(now, **said)

    def _kind(self, number: int) -> bool | None:
        """Whether a step is dense, as far as its number tells; None if the program does."""
        if self._last_dense is None:
            return None
        return number <= self._last_dense and not self._is_over

    def next(self, number: int, now: TrainState) -> Any:
        """The program of the step with this number, which follows a state."""
        kind = self._kind(number)
        if kind is False and self._asks_state and not self._is_over:
            self._is_over = watched.step_of(now.opt_state) > 0
            kind = not self._is_over
        return self.by_kind[kind]

    def last(self) -> Any:
        """The program of the last step."""
        return self.by_kind[self._kind(self._steps)]

    def sent(self) -> measure.Sent:
        """What they send."""
        reports = {kind: jaxcomm.wire_report(x) for kind, x in self.by_kind.items()}
        last = reports[self._kind(self._steps)]
        how, params = self._run.sync, self._run.params
        return measure.Sent(last, how, params, reports.get(True), self._is_dense)

    def _is_dense(self, number: int, frozen_at: int) -> bool:
        """Whether a step was dense, which ended with this `frozen_at` of an earlier step."""
        return not frozen_at if self._asks_state else self._kind(number) is True
