"""Exchanges of random gradients by themselves, to be timed."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomm import _placing
from jaxcomm.collectives import _sending
from jaxcomm.transforms._buckets import split_off_exempt
from jaxcomm.transforms.sparse_mean import SparseMeanState


class Repeated:
    """Runs an exchange repeatedly, each time with the state that the last run returned.

    Attributes:
      program: the compiled program, from gradients and a state to the next state and updates; the
        state is donated to it.
      gradients: those of the next exchange, on all devices.
      state: that of the next exchange.
    """

    def __init__(self, program: Any, gradients: Any, state: Any):
        self.program, self.gradients, self.state = program, gradients, state
        # For a sparse mean with feedback: what it compresses, each gradient plus its residual.
        self._sums: list[jax.Array] | None = None
        if isinstance(state, SparseMeanState) and state.residual.values:
            self._sums = [jax.tree.leaves(gradients)[i] for i in self._compressed()]

    def _compressed(self) -> tuple[int, ...]:
        return split_off_exempt(self.state.layout)[0]

    def prepare(self) -> None:
        """Makes the gradients of the next exchange; this is not part of the exchange.

        Gradients stay the same, except for sparse means with error feedback. With constant
        gradients their residuals would grow by the same amount in every step, and every threshold
        would be off, whereas in training few are. So the sums of gradients and residuals are kept
        as in the first step.
        """
        if self._sums is None:
            return
        leaves, treedef = jax.tree.flatten(self.gradients)
        lacking = _lacking(self._sums, list(self.state.residual.values))
        for i, gradient in zip(self._compressed(), jax.block_until_ready(lacking), strict=True):
            leaves[i] = gradient
        self.gradients = treedef.unflatten(leaves)

    def __call__(self) -> Any:
        """The updates and the next state of one exchange."""
        self.state, updates = self.program(self.gradients, self.state)
        return updates, self.state


@jax.jit
def _lacking(sums: list[jax.Array], parts: list[jax.Array]) -> list[jax.Array]:
    return [x - part for x, part in zip(sums, parts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange to be timed.

    Attributes:
      mesh: the mesh of the devices.
      axes: the mesh axes over which gradients are exchanged.
      tx: the transformation.
      shapes: the shapes of the gradients.
      first_only: whether next to nothing is sent; see `_sending.first_only`.
    """

    mesh: Mesh
    axes: Any
    tx: Any
    shapes: Sequence[tuple[int, ...]]
    first_only: bool = False

    def gradients(self) -> list[jax.Array]:
        """Random gradients, different in each process."""
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
        """The initial state."""
        whole, make = NamedSharding(self.mesh, PartitionSpec()), jax.make_array_from_callback
        with jax.set_mesh(self.mesh), _placing.alone():  # processes get here in other orders
            zeros = [np.zeros(shape, np.float32) for shape in self.shapes]
            return self.tx.init([make(x.shape, whole, x.__getitem__) for x in zeros])

    def lower(self) -> jax.stages.Lowered:
        """Its program, traced."""
        grads, state = self.gradients(), self.state()

        # XLA reuses a donated buffer for the first result of its size, which must be the state.
        def exchange(grads: Any, state: Any) -> tuple[Any, Any]:
            updates, state = self.tx.update(grads, state)
            return state, updates

        with jax.set_mesh(self.mesh), self._sending():
            return jax.jit(exchange, donate_argnums=1).lower(grads, state)

    def _sending(self) -> contextlib.AbstractContextManager[None]:
        return _sending.first_only() if self.first_only else contextlib.nullcontext()

    def run_by(self, program: Any, gradients: list[jax.Array] | None = None) -> Repeated:
        """A callable that exchanges once each time it is called.

        Args:
          program: the compiled result of `lower`.
          gradients: None makes some.
        """
        return Repeated(program, gradients or self.gradients(), self.state())
