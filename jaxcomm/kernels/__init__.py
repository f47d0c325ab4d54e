"""Operations on bits and tiles, one folder each: `f(x, ..., *, implementation=None) -> y`.

The plain version of an operation is its specification. Some operations also have GPU kernels; only
these take `implementation`, and `_implementations` lists them. Kernels know nothing of
other devices or pytrees, and of mesh axes only how types say what varies over them.
"""
