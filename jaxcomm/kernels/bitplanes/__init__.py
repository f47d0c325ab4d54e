"""Bits, 32 to a word, and counts in bit planes that are added and compared without unpacking.

Bit b of word j belongs to coordinate `b * W + j`, where W = ceil(n / 32) is the number of words. A
word takes its bits from 32 streams, and each stream is read in order. `pack` leaves zeros in bits
without a coordinate.

A count per coordinate is a tuple of planes, least significant first: plane p holds bit p of every
count in one uint32 array. P planes count up to 2^P - 1, and logic on words treats 32 counts at a
time. The planes stay a tuple because XLA would read a stack of planes again for each result.

There are only plain versions. XLA on GPU fuses each of them with its neighbours. XLA on CPU gives
every plane of a sum its own loop, which reads again what the lower planes read.
"""

from jaxcomm.kernels.bitplanes.counting import Planes, add, equals, exceeds, greater, planes_for
from jaxcomm.kernels.bitplanes.fields import pack_fields, unpack_fields
from jaxcomm.kernels.bitplanes.packing import (
    BITS,
    pack,
    pack_both,
    places_of_short_words,
    signs,
    unpack,
    votes,
    words_for,
)

__all__ = [
    "BITS",
    "Planes",
    "add",
    "equals",
    "exceeds",
    "greater",
    "pack",
    "pack_both",
    "pack_fields",
    "places_of_short_words",
    "planes_for",
    "signs",
    "unpack",
    "unpack_fields",
    "votes",
    "words_for",
]
