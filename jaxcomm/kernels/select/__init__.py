"""Selection of the largest entries and their compaction, in few passes over the data.

A threshold selects the entries with `|x| >= threshold`, including infinities, but never zeros or
NaN.

`compaction` is the specification; on CPU, counting has its own formulation. For compaction there
are GPU kernels in Triton; `selection` chooses. `threshold` counts on CPUs, and sorts few entries on
GPUs.
"""

from jaxcomm.kernels.select.compaction import Selected, narrow
from jaxcomm.kernels.select.hashing import hashed
from jaxcomm.kernels.select.largest import largest
from jaxcomm.kernels.select.rows import (
    bits_of_rows,
    columns_of,
    largest_of_rows,
    places_in,
    words_of_rows,
)
from jaxcomm.kernels.select.selection import MOST, compact, count_at_least
from jaxcomm.kernels.select.threshold import count_near, threshold_for, threshold_near

__all__ = [
    "MOST",
    "Selected",
    "bits_of_rows",
    "columns_of",
    "compact",
    "count_at_least",
    "count_near",
    "hashed",
    "largest",
    "largest_of_rows",
    "narrow",
    "places_in",
    "threshold_for",
    "threshold_near",
    "words_of_rows",
]
