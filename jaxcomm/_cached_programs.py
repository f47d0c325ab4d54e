"""Programs that jax reads from its compilation cache, and that XLA on CPU then runs out of order.

XLA's CPU backend runs whatever is ready, and keeps the collectives of a program in order by edges
between them. A program that was read back from its serialized form has no edges between collectives
inside a conditional or a loop and those outside. Then one process may wait for a message of one
collective while another process sends a message of the other. The devices of one process meet by
the number of a collective, which is the same for all of them: they mix up two that run at once, and
the process usually crashes.
"""

import jax

from jaxcomm import _axes


def refuse_cached_programs(exchange: str) -> None:
    """Raises where the collectives of a conditional or a loop may run out of order.

    Args:
      exchange: what exchanges there, such as "multi_steps exchanges in a conditional".

    Raises:
      ValueError: if several devices exchange on CPUs and jax keeps compiled programs in a folder.
    """
    options = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
    _, folder = kept = [getattr(jax.config, option) for option in options]
    if all(kept) and _axes.platform() == jax.default_backend() == "cpu" and are_several():
        raise ValueError(
            f"{exchange}, and XLA on CPU loses the order of such exchanges in programs that come "
            f"from jax's compilation cache ({folder}): devices would misread each other's "
            "messages, or crash. Switch the cache off before anything is compiled: "
            'jax.config.update("jax_enable_compilation_cache", False), or set '
            "JAX_ENABLE_COMPILATION_CACHE=false."
        )


def are_several() -> bool:
    """Whether devices exchange at all."""
    return jax.process_count() > 1 or jax.sharding.get_abstract_mesh().size > 1
