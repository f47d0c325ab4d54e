"""Blocks of values that share a scale: the format of int8, int4, fp8, QSGD, TernGrad, scaled sign.

In reading order: `packing` puts codes of 1 to 8 bits into bytes, `rounding` turns numbers into
integers, `blocks` lays out a payload, chooses the unit of each block and decodes, `encoding` takes
the plain version or the kernel, and `integers` encodes whole messages of integers.
"""
