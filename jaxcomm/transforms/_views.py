"""The two views: a transformation asks here which of them it is in, and nothing else knows.

Global view: plain `jax.jit`; gradients and per-device state have a leading device axis, sharded
over the mesh axis. Manual view: inside the user's `jax.shard_map`, where gradients are local and
per-device state has a leading axis of 1.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxcomm import _compat
from jaxcomm.transforms._layout import Layout, restrict
from jaxcomm.transforms.per_device import PerDevice

Arrays = list[jax.Array]
# From local gradients, what only this device has, and what all share, to what is equal on all
# devices of the axis, and the next step's own.
Exchange = Callable[[Arrays, Arrays, Any], tuple[Arrays, Arrays]]


def on_every_device(
    exchange: Exchange,
    grads: Arrays,
    layout: Layout,
    own: PerDevice,
    shared: Any = (),
    further_results: int = 0,
) -> tuple[Arrays, PerDevice]:
    """Runs `exchange` on every device, in a region that is manual over all axes of the mesh.

    There, the checks of `jax.shard_map` are off: `exchange` vouches that its results are equal on
    all devices of the axis. Under an axis that is not manual, flattening a leaf would gather it.

    Args:
      exchange: what one device does; it sees no device axis.
      grads: the gradients as they are in the view we are in.
      layout: what `init` saw.
      own: per-device state.
      shared: a pytree of arrays that all devices hold alike.
      further_results: how many more arrays `exchange` returns behind those of the leaves, equal on
        all devices of the mesh.

    Returns:
      The equal results, in the shapes of the parameters in both views, and the next `own`.
    """
    specs = [leaf.spec for leaf in layout.leaves]
    own_specs = list(own.specs)
    is_manual = _compat.is_manual(layout.axis_name)
    if is_manual:
        further = frozenset(_compat.current_mesh().axis_names) - _compat.manual_axes()
        specs = grad_specs = [restrict(spec, further) for spec in specs]
        own_specs = [
            PartitionSpec(None, *restrict(PartitionSpec(*s[1:]), further)) for s in own.specs
        ]
    else:
        grad_specs = [PartitionSpec(layout.axis_name, *spec) for spec in specs]

    def run(grads: Arrays, own: Arrays, shared: Any) -> tuple[Arrays, Arrays]:
        local = grads if is_manual else [g[0] for g in grads]
        equal, kept = exchange(local, [o[0] for o in own], shared)
        return equal, [o[None] for o in kept]

    equal, kept = jax.shard_map(
        run,
        in_specs=(grad_specs, own_specs, PartitionSpec()),
        out_specs=(specs + [PartitionSpec()] * further_results, own_specs),
        check_vma=False,
    )(grads, own.values, shared)
    if is_manual:
        names = _compat.names_of(layout.axis_name)
        leaves = [
            _compat.as_varying(e, _compat.varying_axes(g).difference(names))
            for e, g in zip(equal[: len(grads)], grads, strict=True)
        ]
        equal = leaves + equal[len(grads) :]
        kept = [
            _compat.as_varying(k, _compat.varying_axes(o))
            for k, o in zip(kept, own.values, strict=True)
        ]
    return equal, PerDevice(kept, own.specs)
