"""Checkpoints with orbax: the state of every device, and each process's input position.

A checkpoint is written under another name, then gets digests of its files, and is renamed when it
is complete. So a checkpoint that a killed run left half written is never read, and one that was
damaged later is known. All processes must see the same directory.
"""

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from train import digests
from train.errors import RunError, UserError
from train.state import TrainState

UNFINISHED = ".orbax-checkpoint-tmp"  # What orbax appends to the name while it writes.
METADATA = "_CHECKPOINT_METADATA"  # Orbax's own, JSON; it gets its last line after the digests.


def where_to_continue(directory: Path, resume: bool, restarted: bool) -> int | None:
    """The step of the newest checkpoint without damage; None if the run is to begin anew.

    Process 0 looks, and all processes follow. Damaged checkpoints that are newer are named, and
    moved out of the directory.

    Args:
      directory: of the checkpoints.
      resume: whether the user wants to continue, so that there must be a checkpoint.
      restarted: whether the launcher has started the run again: with or without a checkpoint.

    Raises:
      UserError: if there is no checkpoint to continue with, or one in the way of a new run.
    """
    steps, whole = [], None
    if jax.process_index() == 0:
        steps = _steps(directory)
        if resume or restarted:
            whole = _newest_whole(directory, steps)
    newest = steps[-1] if steps else None
    found = [-1 if step is None else step for step in (newest, whole)]
    newest, whole = multihost_utils.broadcast_one_to_all(np.array(found, np.int32)).tolist()
    if not resume and not restarted and newest >= 0:
        raise UserError(
            f"{directory} has a checkpoint of step {newest}; continue it with "
            "--config.checkpoint.resume=True, or choose another --workdir"
        )
    if resume and not restarted and whole < 0:
        raise UserError(f"checkpoint.resume: there is no whole checkpoint in {directory}")
    return None if whole < 0 else whole


def _steps(directory: Path) -> list[int]:
    """The steps of complete checkpoints, the newest last."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def _newest_whole(directory: Path, steps: list[int]) -> int | None:
    for step in reversed(steps):
        reason = _damage(directory / str(step))
        if reason is None:
            return step
        aside = directory.parent / f"damaged-checkpoint-{step}"
        while aside.exists():
            aside = aside.with_name(f"{aside.name}-again")
        (directory / str(step)).rename(aside)
        print(
            f"checkpoint {step} is damaged ({reason}): it is moved to {aside}, and the one before "
            "it is taken, if there is one",
            file=sys.stderr,
        )
    return None


def _damage(folder: Path) -> str | None:
    try:
        json.loads((folder / METADATA).read_text())
    except FileNotFoundError:
        return f"{METADATA} is missing"
    except ValueError:
        return f"{METADATA} is cut"
    return digests.damage(folder)


class Checkpoints:
    """The checkpoints of a run: `directory/<step>`, the newest `keep` of them."""

    def __init__(self, directory: Path, keep: int):
        self._directory = directory.absolute()
        # Any: grain's handler fits orbax's interface without saying so.
        handlers: Any = {
            "state": ocp.StandardCheckpointHandler(),
            "input": grain.checkpoint.CheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers=handlers,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                cleanup_tmp_directories=True,
                # On process 0, when all have written and before the folder gets its name.
                async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """A run that fails at the same step in all processes still finishes what it writes."""
        del kind, trace
        if isinstance(error, RunError):
            self.close()

    def save(self, step: int, state: TrainState, position: grain.DatasetIterator) -> None:
        """Writes a checkpoint; the copy out of the devices is made before this returns."""
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), input=grain.checkpoint.CheckpointSave(position)
        )
        self._manager.save(step, args=arguments)

    def check(self) -> None:
        """Raises what has kept an earlier checkpoint from being written; costs microseconds."""
        self._manager.check_for_errors()

    def restore(self, step: int, state: TrainState, position: grain.DatasetIterator) -> TrainState:
        """Reads a checkpoint.

        Args:
          step: which one, as `where_to_continue` found it.
          state: a state of the same shapes, dtypes and shardings; its values are not used.
          position: the input, which is moved to where it was.

        Returns:
          The state, bit for bit as it was saved.

        Raises:
          UserError: if it is one of another model or optimizer.
        """
        self._check(step, state)
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state)),
            input=grain.checkpoint.CheckpointRestore(position),
        )
        return self._manager.restore(step, args=arguments)["state"]

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.close()

    def _seal(self) -> None:
        (folder,) = self._directory.glob(f"*{UNFINISHED}*")  # One is written at a time.
        digests.seal(folder)

    def _check(self, step: int, state: TrainState) -> None:
        found = _shapes(self._manager.item_metadata(step)["state"].tree)
        wanted = _shapes(state)
        where = f"checkpoint {step} in {self._directory} does not fit this model and optimizer"
        # Parameters first: they say more than what the optimizer keeps for each of them.
        for name in sorted(found.keys() | wanted.keys(), key=lambda n: (n.startswith("opt"), n)):
            there, here = found.get(name, "absent"), wanted.get(name, "absent")
            if there != here:
                raise UserError(f"{where}: {name} is {there} there and {here} here")
        if not (self._directory / str(step) / "input" / _input_file()).exists():
            raise UserError(
                f"checkpoint {step} in {self._directory} is one of another number of "
                f"processes than {jax.process_count()}"
            )


def _input_file() -> str:
    return f"process_{jax.process_index()}-of-{jax.process_count()}.json"


def _shapes(tree: object) -> dict[str, str]:
    """Name of each leaf, as orbax writes it, to its shape and dtype."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }
