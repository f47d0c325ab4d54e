"""Compares what should be equal on all devices: one flipped bit ends the run and is located.

Each device hashes every parameter that it holds, in one pass over memory, and sends 8 bytes per
parameter array. So a machine's fault is found before it is in every checkpoint.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.errors import RunError
from train.sync import AXIS

ODD = (2654435761, 2246822519)  # any odd numbers
MIX = (0x7FEB352D, 0x846CA68B)  # of C. Wellons's lowbias32


def hashes(params: Any) -> jax.Array:
    """Two 32-bit hashes of each array, `[arrays, 2]`, of the bits that this device holds.

    The sums over all words of a mixture of the word and its position, which is invertible: a change
    of one word always changes both sums. Several changes cancel by chance alone, also of signs.
    """
    rows = []
    for leaf in jax.tree.leaves(params):
        unsigned = {2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        words = jax.lax.bitcast_convert_type(leaf.reshape(-1), unsigned).astype(jnp.uint32)
        place = jax.lax.iota(jnp.uint32, words.size)
        rows.append(jnp.stack([_mixed(words + place * jnp.uint32(odd)).sum() for odd in ODD]))
    return jnp.stack(rows)


def _mixed(x: jax.Array) -> jax.Array:
    """Another uint32 for each uint32; one bit changes about half of the bits."""
    for shift, factor in zip((16, 15), MIX, strict=True):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def make_check(params: Any, method: str) -> Callable[[Any, int], None]:
    """A function of parameters and a step, compiled for parameters like these.

    Args:
      params: the parameters.
      method: that of `config.sync`; with "none", parameters differ on purpose, and nothing is
        compared.

    Returns:
      `check(params, step)`, which raises a RunError on all processes if two devices hold different
      bits, and names the devices and the first array. What is split over all devices has no copies
      to compare.
    """
    mesh = jax.sharding.get_mesh()
    names, copied = _copied(params)
    if not copied or method == "none":
        return lambda params, step: None
    # Without the check that replicated values are equal, because that is the question.
    gathered = jax.shard_map(
        lambda p: jax.lax.all_gather(hashes(p), mesh.axis_names),
        in_specs=([_spec_of(leaf) for leaf in copied],),
        out_specs=jax.P(),
        check_vma=False,
    )
    compiled = jax.jit(gathered).lower(copied).compile()

    def check(params: Any, step: int) -> None:
        found = np.asarray(compiled(_copied(params)[1]))  # [devices, arrays, 2]
        odd = _odd(found, mesh.size // mesh.shape[AXIS])
        if not odd:
            return
        differs = np.stack([found[i] != found[usual] for i, usual in odd.items()]).any((0, 2))
        devices = list(mesh.devices.flat)
        where = ", ".join(f"{i} (process {devices[i].process_index})" for i in odd)
        raise RunError(
            f"after step {step}, the parameters of device {where} differ from those of the others: "
            f"{names[int(differs.argmax())]} is the first of {int(differs.sum())} that differ; "
            "continue from the last checkpoint, and check that machine and its checkout",
            status=1,
        )

    return check


def _odd(found: np.ndarray, parts: int) -> dict[int, int]:
    """The devices whose hashes are not the usual ones, each with a device that has the usual ones.

    Args:
      found: hashes by device.
      parts: the number of neighbours that hold different parts; only equal parts are compared.
    """
    odd = {}
    for part in range(parts):
        rows = {i: found[i].tobytes() for i in range(part, len(found), parts)}
        usual, _ = Counter(rows.values()).most_common(1)[0]
        like = next(i for i, row in rows.items() if row == usual)
        odd |= {i: like for i, row in rows.items() if row != usual}
    return dict(sorted(odd.items()))


def _copied(params: Any) -> tuple[list[str], list[jax.Array]]:
    """The names and arrays of which each device, or each group of devices, holds a copy."""
    pairs = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if AXIS not in jax.tree.leaves(tuple(_spec_of(leaf)))
    ]
    return [name for name, _ in pairs], [leaf for _, leaf in pairs]


def _spec_of(leaf: jax.Array) -> jax.P:
    assert isinstance(leaf.sharding, jax.NamedSharding)  # parameters are placed on a mesh
    return leaf.sharding.spec
