"""The version of jax, for the few things that differ: no other file looks at `jax.__version__`."""

import jax


def jax_version() -> tuple[int, ...]:
    """The version of jax, such as (0, 10, 2)."""
    return jax.__version_info__
