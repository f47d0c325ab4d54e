"""Who talks to whom in an all-reduce: what `algorithm=` of means and votes takes."""

from jaxcomm.collectives.algorithms import *  # noqa: F403 - all that it lists
