"""Which devices are of one host, as far as jax knows."""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxcomm import _axes
from jaxcomm._axes import Axis, AxisName, Part
from jaxcomm._users_line import users_line


def devices_per_host(axis_name: AxisName) -> int:
    """The number of devices of each host that follow each other along an axis; 1 if they do not.

    It is the same in all processes. While code is traced, jax tells the shape of the mesh but not
    its devices, so these are assumed to be all devices in jax's order, as in `jaxcomm.data_mesh`
    and `jax.make_mesh`. In another order an exchange by hosts is right, but sends more than one
    that goes directly: `warn_of_order`.
    """
    mesh, names = jax.sharding.get_abstract_mesh(), _axes.names_of(axis_name)
    if not set(names).issubset(mesh.axis_names):
        return 1
    devices = jax.devices()
    if len(devices) != math.prod(mesh.axis_sizes):
        return 1
    return _in_a_row(_hosts_along(devices, mesh, names))


def levels(axis_name: AxisName) -> tuple[Axis, Part | None]:
    """What hosts exchange over, and what the devices of each do; None if hosts have one device.

    A single host is one level: its devices exchange over the axis.
    """
    world, on_host = _axes.axis_size(axis_name), devices_per_host(axis_name)
    if not 1 < on_host < world:
        return axis_name, None
    return _axes.levels_of(axis_name, on_host)


def note_of(axis_name: AxisName) -> str:
    """What to add to the name of an exchange that goes by hosts where they have several devices."""
    return "" if levels(axis_name)[1] is None else ", by hosts"


def warn_of_order(axis_name: AxisName, instead: str = ', or write algorithm="direct"') -> None:
    """Warns, outside of traced code, if the mesh has its devices in another order than assumed.

    Args:
      axis_name: the mesh axis, or axes.
      instead: what else the user can do.
    """
    assumed, world = devices_per_host(axis_name), _axes.axis_size(axis_name)
    if not 1 < assumed < world or isinstance(jnp.zeros((), bool), Tracer):
        return
    mesh = jax.sharding.get_mesh()
    found = _hosts_along(mesh.devices.flat, mesh.abstract_mesh, _axes.names_of(axis_name))
    groups = found.reshape(-1, assumed)
    if (groups != groups[:, :1]).any():
        warnings.warn(
            f"along {axis_name!r} the mesh has its devices in another order than jax.devices(), so "
            f"each {assumed} in a row are taken for those of one host, and are not: much more is "
            "sent between hosts than needed. Make the mesh of jax.devices() in their "
            f"order{instead}.",
            stacklevel=users_line(),
        )


def _hosts_along(devices: Iterable[Any], mesh: Any, names: tuple[str, ...]) -> np.ndarray:
    """The host of each device, a row for each group that exchanges, in the order of the axis."""
    hosts = np.asarray([host_of(device) for device in devices]).reshape(mesh.axis_sizes)
    along = [mesh.axis_names.index(name) for name in names]
    others = [i for i in range(hosts.ndim) if i not in along]
    world = math.prod(mesh.axis_sizes[i] for i in along)
    return hosts.transpose(*others, *along).reshape(-1, world)


def _in_a_row(hosts: np.ndarray) -> int:
    """How many devices in a row have one host, if the same number everywhere; else 1."""
    world = hosts.shape[1]
    changes = np.flatnonzero((hosts[:, 1:] != hosts[:, :-1]).any(axis=0))
    size = int(changes[0]) + 1 if changes.size else world
    if world % size:
        return 1
    first = hosts[:, ::size]
    is_even = (np.repeat(first, size, axis=1) == hosts).all()
    are_apart = all(len(set(row)) == len(row) for row in first.tolist())
    return size if is_even and are_apart else 1


def host_of(device: Any) -> int:
    """A number of its host; of a TPU, of its slice, within which links are fast.

    jax's `slice_index` tells GPUs of one machine from those of others (XLA compares boot ids), so
    that each may have its own process. CPU processes of one machine exchange as if they were apart.
    """
    if device.platform == "cpu":
        return device.process_index
    return getattr(device, "slice_index", device.process_index)
