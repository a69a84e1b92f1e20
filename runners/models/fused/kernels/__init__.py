"""Triton kernels of the fused layers. Importing a module of this package needs triton.

Every kernel has a plain torch twin in `runners.models.fused`; tests compare the two, on a CPU by
Triton's interpreter. None of them adds floats atomically: the same shape gives the same bits.
"""
