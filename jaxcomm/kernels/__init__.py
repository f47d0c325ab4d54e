"""Operations on bits and tiles, one folder each: `f(x, ..., *, implementation=None) -> y`.

The plain version of an operation is its specification. Some operations also have GPU kernels; only
these take `implementation`, and `_implementations` lists them. Kernels know nothing of mesh axes,
other devices or pytrees.
"""
