"""The version of jax, for the few things that differ: no other file looks at `jax.__version__`."""

import jax
import jaxlib.version

from jaxcomm._version import __version__


def jax_version() -> tuple[int, ...]:
    """The version of jax, such as (0, 10, 2)."""
    return jax.__version_info__


def versions() -> str:
    """Of what makes the programs of a process, and what keys become in them.

    Labels of builds, such as "+cuda13", are left out.
    """
    of_jax = f"jax {jax.__version__}, jaxlib {jaxlib.version.__version__.split('+')[0]}"
    options = "jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable"
    set_to = (f"{option}={getattr(jax.config, option, None)}" for option in options)
    return ", ".join([f"jaxcomm {__version__}", of_jax, *set_to])
