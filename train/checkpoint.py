"""Checkpoints with orbax: the state of every device, and each process's input position.

A checkpoint is written under another name, then gets digests of its files, and is renamed when it
is complete. So a checkpoint that a killed run left half written is never read, and one that is
damaged later is noticed. All processes must see the same directory.
"""

import functools
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grain
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as managers

import jaxcomm
from train import digests, fitting, sync
from train.errors import RunError, UserError
from train.state import TrainState
from train.workdir import write_whole

UNFINISHED = ".orbax-checkpoint-tmp"  # What orbax appends to the name while it writes.
METRICS = Path("metrics", "metrics")  # Orbax's own, in a checkpoint: the results of its test.
METADATA = "_CHECKPOINT_METADATA"  # Orbax's own, JSON; it gets its last line after the digests.

# Devices that hold the same array each write a slice of it, cut out by a program that is compiled
# for its shape. Below 1 MiB per device this takes longer than one device writing all of it.
ARRAYS = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**20)


def where_to_continue(
    directory: Path, resume: bool, restarted: bool, changed: Sequence[str] = ()
) -> int | None:
    """The step of the newest undamaged checkpoint; None if the run should begin anew.

    Process 0 looks, and all processes follow. Newer checkpoints that are damaged are named and
    moved out of the directory.

    Args:
      directory: of the checkpoints.
      resume: whether the user wants to continue, so that there must be a checkpoint.
      restarted: whether the launcher has started the run again; a checkpoint is then optional.
      changed: the fields in which the run of this directory had another config. A restart does not
        continue that run: the first start was refused, or ended before it looked.

    Raises:
      UserError: if there is no checkpoint to continue from, or if one is in the way of a new run.
    """
    steps, whole = [], None
    restarted = restarted and not changed
    if jax.process_index() == 0:
        find = functools.partial(_steps, directory)
        steps = find()
        if resume or restarted:
            _drop_unsealed_metrics(directory)
            _move_unreadable(directory)
            whole = _last_whole(directory, find, move=True)
    newest = steps[-1] if steps else None
    found = [-1 if step is None else step for step in (newest, whole)] + [restarted]
    found = multihost_utils.broadcast_one_to_all(np.array(found, np.int32)).tolist()
    newest, whole, restarted = found
    if not resume and not restarted and newest >= 0:
        other = f", of a run with another config: {', '.join(changed)}" if changed else ""
        raise UserError(
            f"{directory} has a checkpoint of step {newest}{other}; continue it with "
            "--config.checkpoint.resume=True, or choose another --workdir"
        )
    if resume and not restarted and whole < 0:
        raise UserError(
            f"checkpoint.resume: there is no complete checkpoint in {directory}; set --workdir to "
            "the folder of the run to continue; without --config.checkpoint.resume one starts anew"
        )
    return None if whole < 0 else whole


def _steps(directory: Path) -> list[int]:
    """The steps of complete checkpoints, the newest last."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def where_to_evaluate(directory: Path, best: str) -> int:
    """The step of the newest or the best undamaged checkpoint; no file is changed.

    Process 0 looks, and all processes follow.

    Args:
      directory: of the checkpoints.
      best: the score by which checkpoints are compared, one of `train.check.SCORES`; empty for the
        newest.

    Raises:
      UserError: if there is none.
    """
    whole = None
    if jax.process_index() == 0:
        find = functools.partial(_from_worst, directory, best) if best else None
        whole = _last_whole(directory, find or functools.partial(_steps, directory), move=False)
    step = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if whole is None else whole)))
    if step < 0:
        kind = f" of a run with --config.checkpoint.best={best}" if best else ""
        raise UserError(
            f"--evaluate: there is no complete checkpoint{kind} in {directory}; set --workdir to "
            "the folder of a run" + (", or leave out best for the newest" if best else "")
        )
    return step


def _from_worst(directory: Path, best: str) -> list[int]:
    """The steps of checkpoints that were tested, the best last."""
    found = {step: _tested(directory / str(step)) for step in _steps(directory)}
    scores = {step: _score(best, tested) for step, tested in found.items() if tested}
    return sorted(scores, key=scores.__getitem__)


def _last_whole(directory: Path, find: Callable[[], list[int]], move: bool) -> int | None:
    """The last undamaged checkpoint; names damaged ones, and may move them away.

    Args:
      directory: of the checkpoints.
      find: the steps among which to look.
      move: whether to move damaged ones; if not, a running training may delete checkpoints.
    """
    steps = find()
    for step in reversed(steps):
        reason = _damage(directory / str(step))
        if reason is None:
            return step
        if not move and find() != steps:  # Before a run deletes a checkpoint, it saves a newer one.
            return _last_whole(directory, find, move)
        moved = f"it is moved to {_move(directory / str(step))}, and " if move else ""
        print(
            f"checkpoint {step} is damaged ({reason}): {moved}the previous one is used, if there "
            "is one",
            file=sys.stderr,
        )
    return None


def _drop_unsealed_metrics(directory: Path) -> None:
    """Drops metrics whose writing was cut off: `Checkpoints.score` adds them, then seals them."""
    for step in _steps(directory):
        folder = directory / str(step)
        if (folder / METRICS.parent).exists() and not digests.has(folder, METRICS):
            shutil.rmtree(folder / METRICS.parent)


def _move_unreadable(directory: Path) -> None:
    """Moves checkpoints whose metrics are cut: orbax reads those of all, and would fail."""
    for step in _steps(directory):
        folder = directory / str(step)
        if (folder / METRICS.parent).exists() and _tested(folder) is None:
            print(
                f"checkpoint {step} is damaged (its metrics cannot be read): it is moved to "
                f"{_move(folder)}",
                file=sys.stderr,
            )


def _move(folder: Path) -> Path:
    """Moves a damaged checkpoint out of the directory of checkpoints."""
    aside = folder.parent.parent / f"damaged-checkpoint-{folder.name}"
    while aside.exists():
        aside = aside.with_name(f"{aside.name}-again")
    return folder.rename(aside)


def is_whole(directory: Path, step: int) -> bool:
    """Whether a checkpoint is still there, without damage."""
    return _damage(directory / str(step)) is None


def _damage(folder: Path) -> str | None:
    try:
        json.loads((folder / METADATA).read_text())
    except FileNotFoundError:
        return f"{METADATA} is missing"
    except ValueError:
        return f"{METADATA} is cut"
    except OSError as error:
        return f"{METADATA} cannot be read: {error.strerror}"
    return digests.damage(folder)


class Checkpoints:
    """The checkpoints of a run: `directory/<step>`, the newest `keep` of them, and the best.

    Args:
      directory: of the checkpoints.
      keep: how many of the newest stay.
      best: the score by which checkpoints are compared, one of `train.check.SCORES`; among equals
        the newest is best. Empty keeps only the newest ones.
    """

    def __init__(self, directory: Path, keep: int, best: str = ""):
        self._directory = directory.absolute()
        self._keep, self._best = keep, best
        score = functools.partial(_score, best) if best else None
        kept: list[Any] = [managers.LatestN(keep)]
        if score is not None:
            kept.append(
                managers.BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False)
            )
        # Any: grain's handler fits orbax's interface without declaring it.
        handlers: Any = {
            "state": ocp.PyTreeCheckpointHandler(
                type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                    (jax.Array, ARRAYS)
                )
            ),
            "input": grain.checkpoint.CheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers=handlers,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=managers.AnyPreservationPolicy(kept),
                best_fn=score,  # With it, orbax writes the metrics of a checkpoint.
                cleanup_tmp_directories=True,
                # Called on process 0 when all have written, before the folder gets its name.
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

    def save(
        self,
        step: int,
        state: TrainState,
        position: grain.DatasetIterator,
        tested: dict[str, float] | None = None,
    ) -> None:
        """Writes a checkpoint; the copy from the devices is made before this returns.

        Args:
          step: the number of steps taken.
          state: the state after them.
          position: the input, whose position is saved.
          tested: the results of a test of the parameters; without them this checkpoint is not the
            best.
        """
        arguments = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state), input=grain.checkpoint.CheckpointSave(position)
        )
        self._manager.save(step, args=arguments, metrics=tested)

    def score(self, step: int, tested: dict[str, float]) -> None:
        """Adds a test to a checkpoint whose run was asked to end and had no time for it.

        The newest and the best then stay, as if it had been saved with the test. Does nothing
        without `best`.

        Args:
          step: the step of the checkpoint; does nothing if there is none, or if it has been tested.
          tested: the results of the test.
        """
        if not self._best or step not in self._manager.all_steps():
            return
        self._manager.wait_until_finished()
        folder = self._directory / str(step)
        if jax.process_index() == 0 and _tested(folder) is None:
            write_whole(folder / METRICS, json.dumps(tested))
            digests.seal(folder)
        multihost_utils.sync_global_devices(f"score {step}")
        self._manager.reload()
        steps = self._manager.all_steps()
        for old in sorted({*steps} - {*steps[-self._keep :], self._manager.best_step()}):
            self._manager.delete(old)

    def check(self) -> None:
        """Raises what kept an earlier checkpoint from being written; takes microseconds."""
        self._manager.check_for_errors()

    def restore(
        self,
        step: int,
        state: TrainState,
        position: grain.DatasetIterator,
        tx: optax.GradientTransformation,
        changed: Sequence[str] = (),
    ) -> TrainState:
        """Reads a checkpoint, also one from another number of devices or processes.

        Args:
          step: which one, as `where_to_continue` found it.
          state: the state at the beginning of this run; it gives shapes, dtypes and shardings.
          position: the input, which is moved to the saved position.
          tx: the transformation that made `state.opt_state`.
          changed: the fields in which the config differs, see `workdir.changes`.

        Returns:
          The state, bit for bit as it was saved. On another number of devices,
          `jaxcomm.resize_state` adapts what differs from device to device.

        Raises:
          UserError: if it belongs to another model, optimizer or exchange.
        """
        found = fitting.leaves(self._manager.item_metadata(step)["state"].tree)
        where = f"checkpoint {step} in {self._directory} does not fit this model and optimizer"
        fitting.check_exempt(changed, state)
        fitting.check(where, found, state)
        wanted = jax.tree_util.tree_map_with_path(
            lambda path, x: fitting.like(found[fitting.name_of(path)], x), state
        )
        how = ocp.checkpoint_utils.construct_restore_args(wanted)
        arguments = ocp.args.Composite(state=ocp.args.PyTreeRestore(wanted, restore_args=how))
        try:
            saved = self._manager.restore(step, args=arguments)["state"]
        except ValueError as error:
            if "tree structures do not match" not in str(error):
                raise
            # All arrays fit, but the nodes that hold them differ, such as how parameters are split.
            raise UserError(
                f"checkpoint {step} in {self._directory} is of another config.sync, such as "
                "another gather: set that of config.json, or choose another --workdir"
            ) from error
        # All processes have read equally many batches.
        (file,) = (self._directory / str(step) / "input").glob("process_0-of-*.json")
        position.set_state(json.loads(file.read_text()))
        if jax.tree.map(np.shape, saved) == jax.tree.map(np.shape, state):
            return saved
        try:
            resized = jaxcomm.resize_state(tx, saved.opt_state, saved.params)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        if jax.process_index() == 0:
            print(
                f"checkpoint {step} was saved on another number of devices or groups of them: what "
                "each kept for itself, such as residuals, is adapted to "
                f"{jax.sharding.get_mesh().shape[sync.AXIS]}",
                file=sys.stderr,
            )
        return saved._replace(opt_state=resized)

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.close()

    def _seal(self) -> None:
        (folder,) = self._directory.glob(f"*{UNFINISHED}*")  # One is written at a time.
        digests.seal(folder)


def read_params(directory: Path, step: int, like: Any) -> Any:
    """Reads only the parameters of a checkpoint.

    Args:
      directory: of the checkpoints.
      step: which one.
      like: parameters on their devices, which give shapes, dtypes and shardings.

    Raises:
      UserError: if it belongs to another model.
    """
    wanted = {"params": jax.tree.map(lambda x: fitting.like(x, x), like)}
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    read = ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True)
    folder = directory.absolute() / str(step) / "state"
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = {"params": checkpointer.metadata(folder).item_metadata.tree["params"]}
        where = f"checkpoint {step} in {directory} does not fit this model"
        fitting.check(where, fitting.leaves(found), wanted)
        return checkpointer.restore(folder, args=read)["params"]


def _score(best: str, tested: Mapping[str, float]) -> float:
    """How good a checkpoint is: higher is better, and a score that is not finite is worst."""
    value = tested[best] if best != "test_loss" else -tested[best]
    return value if math.isfinite(value) else -math.inf


def _tested(folder: Path) -> dict[str, float] | None:
    """The results of a checkpoint's test that orbax has kept."""
    try:
        return json.loads((folder / METRICS).read_text())
    except (OSError, ValueError):
        return None
