"""Powers of two: the values of natural compression.

`rounding` rounds float32 to exponent fields and turns these into values. `nine_bits` encodes whole
messages in 9 bits per value, and `window` in 8 bits for the exponents below the largest.
"""
