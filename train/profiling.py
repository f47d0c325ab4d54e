"""A profile of some steps, which TensorBoard opens (`pip install tensorboard-plugin-profile`)."""

import sys
from pathlib import Path

import jax

BEFORE = 10  # Steps before the profile: the first ones warm up.


class Profile:
    """Traces `steps` steps of process 0 into `workdir/plugins/profile`.

    Args:
      workdir: the directory of the run; TensorBoard finds the profile beside the scalars.
      start: steps taken before this run.
      steps: how many to trace; 0 traces none.
    """

    def __init__(self, workdir: Path, start: int, steps: int):
        self._workdir = workdir
        self._first = start + BEFORE + 1
        self._end = self._first + steps
        self._wanted = steps > 0 and jax.process_index() == 0
        self._running = self._is_written = False

    def before(self, step: int, state: object) -> None:
        """Called before a step is started, with the state of the step before."""
        if self._wanted and step == self._first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._workdir))
            self._running = True
        if self._running and step == self._end:
            self.close(state)

    def close(self, state: object) -> None:
        """Writes what has been traced, if anything."""
        if self._wanted and not self._running and not self._is_written:
            print(
                f"no profile was written: it begins with step {self._first}, after {BEFORE} others",
                file=sys.stderr,
            )
        if self._running:
            self._is_written = True
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._running = False
