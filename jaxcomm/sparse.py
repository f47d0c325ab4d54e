"""Sparse all-reduces: what `algorithm=` of `jaxcomm.sparse_mean` takes."""

from jaxcomm.collectives.sparse import *  # noqa: F403 - all that it lists
