"""Tests a checkpoint of a run, without training: `python -m train --evaluate`."""

import json
import sys
from pathlib import Path
from typing import Any

import jax

from train import agreement, check, checkpoint, groups, step, sync
from train.errors import UserError, memory_for
from train.metrics import finite
from train.run import MODEL, data_and_model
from train.workdir import CHECKPOINTS, changes, naming_changes

TESTED = ("data.", "model.")  # Fields that a test depends on.


def evaluate(config: Any, workdir: Path) -> dict[str, Any]:
    """Tests the parameters of a checkpoint; process 0 prints one line of JSON.

    It is the best checkpoint by `config.checkpoint.best`, or the newest if that is empty. Nothing
    is written, so a run that is still training may be tested. The number of devices, the exchange
    and the optimizer may differ from the run's.

    Args:
      config: a config of `configs/`.
      workdir: the directory of the run.

    Returns:
      `step` of the checkpoint, `test_loss`, `test_accuracy`, and how much was tested.

    Raises:
      train.errors.UserError: if config, data and checkpoint do not fit together.
    """
    check.fields(config)
    agreement.check_same(config)
    check.fit_to_evaluate(config, jax.device_count())
    if not groups.can_form(config.sync, jax.device_count()):
        config = config.copy_and_resolve_references()
        config.sync.fsdp = 1
    rows, forward, params = data_and_model(config)
    with naming_changes(workdir, config), memory_for(*MODEL):
        like = sync.place(params, config.sync)
        saved, params = read(workdir / CHECKPOINTS, config.checkpoint.best, like)
    changed = [change for change in changes(workdir, config) if change.startswith(TESTED)]
    tested = step.make_test(forward, rows.test)(params)
    found = {"step": saved, **tested, f"test_{rows.unit}": rows.test_size}
    if jax.process_index() == 0:
        if changed:
            print(f"the run had another config: {', '.join(changed)}", file=sys.stderr)
        print(json.dumps(finite(found), allow_nan=False), flush=True)
    return found


def read(directory: Path, best: str, like: Any, again: bool = True) -> tuple[int, Any]:
    """The step of the newest or best checkpoint, and its parameters.

    A run that is still training may delete the checkpoint meanwhile. A single process then looks
    for another one, once; several processes do not, because each may be at another point.

    Raises:
      train.errors.UserError: if there is none, it does not fit, or it was deleted.
    """
    saved = checkpoint.where_to_evaluate(directory, best)
    try:
        return saved, checkpoint.read_params(directory, saved, like)
    except Exception as error:
        if checkpoint.is_whole(directory, saved):
            raise
        if again and jax.process_count() == 1:
            return read(directory, best, like, again=False)
        raise UserError(
            f"the run deleted checkpoint {saved} while it was read; start --evaluate again"
        ) from error
