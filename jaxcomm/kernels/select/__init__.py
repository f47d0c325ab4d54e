"""Selection of the largest entries and their compaction, in passes over the data and no sort.

A threshold divides the entries: those with `|x| >= threshold` are selected, infinities too, and
never zeros or NaN. One pass packs a bit per entry; all that follows works on these words, and on
as many slots as there is space for entries.

The plain versions below are the specification, and counting has a second one for CPU. For GPUs
there are kernels beside them: of counting in Mosaic, and of compaction in Triton.
"""

from jaxcomm.kernels.select.compaction import (
    Selected,
    boundaries_for,
    compact,
    compact_regions,
    count_at_least,
)
from jaxcomm.kernels.select.threshold import threshold_for
from jaxcomm.kernels.select.words import CHUNK

__all__ = [
    "CHUNK",
    "Selected",
    "boundaries_for",
    "compact",
    "compact_regions",
    "count_at_least",
    "threshold_for",
]
