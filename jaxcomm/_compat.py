"""What differs between versions of jax: the only file that may look at `jax.__version__`."""

import jax


def jax_version() -> tuple[int, ...]:
    """The version of jax, such as (0, 10, 2)."""
    return jax.__version_info__
