"""Checkpoints with orbax: the state of every device, and each process's input position.

A checkpoint is written under another name and renamed when it is complete. So a checkpoint that a
killed run left half written is never read. All processes must see the same directory.
"""

from pathlib import Path
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp

from train.errors import UserError
from train.state import TrainState


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
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
        )

    def require_none(self) -> None:
        """Raises if an earlier run has left checkpoints, which a new one would mix with its own."""
        step = self._manager.latest_step()
        if step is not None:
            raise UserError(
                f"{self._directory} has a checkpoint of step {step}; continue it with "
                "--config.checkpoint.resume=True, or choose another --workdir"
            )

    def save(self, step: int, state: TrainState, position: grain.DatasetIterator) -> None:
        """Writes a checkpoint; the copy out of the devices is made before this returns."""
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), input=grain.checkpoint.CheckpointSave(position)
        )
        self._manager.save(step, args=arguments)

    def restore(self, state: TrainState, position: grain.DatasetIterator) -> TrainState:
        """Reads the newest checkpoint.

        Args:
          state: a state of the same shapes, dtypes and shardings; its values are not used.
          position: the input, which is moved to where it was.

        Returns:
          The state, bit for bit as it was saved.

        Raises:
          UserError: if there is no checkpoint, or it is one of another model or optimizer.
        """
        step = self._manager.latest_step()
        if step is None:
            raise UserError(f"checkpoint.resume: there is no checkpoint in {self._directory}")
        self._check(step, state)
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state)),
            input=grain.checkpoint.CheckpointRestore(position),
        )
        return self._manager.restore(step, args=arguments)["state"]

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.close()

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
