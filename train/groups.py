"""Groups of devices within which parameters are split: whether they can be formed."""

from typing import Any

from train.errors import UserError


def can_form(sync: Any, world: int) -> bool:
    """Whether this many devices form groups of `fsdp`."""
    return sync.fsdp == 1 or (world > sync.fsdp and world % sync.fsdp == 0)


def fit(sync: Any, world: int) -> None:
    """Raises if parameters cannot be split within groups of `fsdp` devices."""
    where = f"config.sync.fsdp={sync.fsdp}"
    for field, value in (("gather", sync.get("gather") or None), ("every", sync.every)):
        if value not in (None, 1):
            raise UserError(
                f"{where} splits parameters within groups of devices, and config.sync.{field}="
                f"{value} keeps them in another way; set --config.sync.fsdp=1, or leave out {field}"
            )
    if sync.method == "auto":
        raise UserError(f"{where}: the planner has no such groups; name a method, such as mean")
    fitting = [n for n in range(2, world // 2 + 1) if world % n == 0]
    if not can_form(sync, world):
        raise UserError(
            f"{where}: {world} devices do not form two or more groups of {sync.fsdp}; use "
            f"{' or '.join(map(str, (1, *fitting)))}, or config.sync.gather to split over all"
        )
