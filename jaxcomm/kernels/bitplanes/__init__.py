"""Bits, 32 to a word, and counts of them in bit planes that are added and compared still packed.

Bit b of word j belongs to coordinate `b * W + j`, where W = ceil(n / 32) is the number of words: a
word takes its bits from 32 streams, each of which is read in order. The bits that no coordinate
owns are zero when packed.

A count per coordinate is a tuple of planes, least significant first: plane p holds bit p of every
count, in one uint32 array. P planes count up to 2^P - 1, and logic on words treats 32 counts at a
time. The planes stay a tuple because stacking them makes XLA read the stack again for each result.

The plain versions below are the specification: XLA fuses each of them with its neighbours. What
adds planes, and what adds signs to something, are kernels too. On CPU XLA gives every plane of a
sum a loop of its own, though, which reads again what the planes below it read.
"""

from jaxcomm.kernels.bitplanes.counting import (
    Planes,
    add,
    equals,
    exceeds,
    greater,
    majority,
    planes_for,
)
from jaxcomm.kernels.bitplanes.packing import (
    BITS,
    add_signs,
    pack,
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
    "add_signs",
    "equals",
    "exceeds",
    "greater",
    "majority",
    "pack",
    "places_of_short_words",
    "planes_for",
    "signs",
    "unpack",
    "votes",
    "words_for",
]
