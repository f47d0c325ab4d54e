"""Operations on bits and tiles: `f(x, *, implementation=None) -> y`, one folder each.

Kernels know nothing of axes, devices or pytrees.
"""
