"""Exchanges of random gradients by themselves, to be timed."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomm import mesh as mesh_
from jaxcomm.collectives import _sending

Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange.

    Attributes:
      mesh: of the devices.
      axes: of the mesh, over which gradients are exchanged.
      tx: the transformation.
      shapes: of the gradients.
      first_only: whether little more than nothing is sent; see `_sending.first_only`.
    """

    mesh: Mesh
    axes: Any
    tx: Any
    shapes: Sequence[tuple[int, ...]]
    first_only: bool = False

    def gradients(self) -> list[jax.Array]:
        """Other ones in each process."""
        rng = np.random.default_rng(jax.process_index())
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axes))
        count = len(self.mesh.local_devices)
        return [
            jax.make_array_from_process_local_data(
                sharding, rng.standard_normal((count, *shape), np.float32)
            )
            for shape in self.shapes
        ]

    def state(self) -> Any:
        """Of the beginning."""
        with jax.set_mesh(self.mesh):
            zeros = [jnp.zeros(shape, jnp.float32) for shape in self.shapes]
            return self.tx.init(mesh_.replicate(zeros))

    def lower(self) -> jax.stages.Lowered:
        """Its program, traced."""
        grads, state = self.gradients(), self.state()

        # XLA gives what is donated to the first result of its size: the state has to be that.
        def exchange(grads: Any, state: Any) -> tuple[Any, Any]:
            updates, state = self.tx.update(grads, state)
            return state, updates

        with jax.set_mesh(self.mesh), self._sending():
            return jax.jit(exchange, donate_argnums=1).lower(grads, state)

    def _sending(self) -> contextlib.AbstractContextManager[None]:
        return _sending.first_only() if self.first_only else contextlib.nullcontext()

    def run_by(self, program: Any, gradients: list[jax.Array] | None = None) -> Run:
        """What exchanges once; each time has the state of the time before.

        Args:
          program: what was lowered, compiled.
          gradients: None makes some.
        """
        grads = self.gradients() if gradients is None else gradients
        kept = [self.state()]

        def run() -> Any:
            kept[0], updates = program(grads, kept[0])
            return updates, kept[0]

        return run
