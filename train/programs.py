"""The compiled training steps of a run: one, or one for its dense steps and one for the others."""

import dataclasses
from typing import Any

from train import sync
from train.run import Run
from train.state import TrainState


@dataclasses.dataclass(frozen=True)
class Programs:
    """What was compiled. One program would exchange in a conditional, which nothing overlaps with.

    Attributes:
      last_dense: the last dense step, if that is known before the run; otherwise None.
      by_kind: the programs of the steps that are still to come, by whether they are dense; None is
        one for all.
    """

    last_dense: int | None
    by_kind: dict[bool | None, Any]

    def kind(self, number: int) -> bool | None:
        """Whether a step is dense; None if its state tells."""
        return None if self.last_dense is None else number <= self.last_dense

    def of(self, number: int) -> Any:
        """The program of a step."""
        return self.by_kind[self.kind(number)]


def compiled(run: Run, now: TrainState, steps: int) -> Programs:
    """Compiles what a run of so many steps needs from this state on."""
    programs = Programs(sync.last_dense(run.sync, steps), {})
    for number in (min(int(now.step) + 1, steps), steps):
        kind = programs.kind(number)
        if kind not in programs.by_kind:
            said = {} if kind is None else {"dense": kind}
            programs.by_kind[kind] = run.compile(now, **said)
    return programs
