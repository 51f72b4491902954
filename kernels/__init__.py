"""Ops over fixed vocabulary codes, one folder each: kronecker, binary_code, sign_code, code_loss, bitlinear.

Import an op from its folder (``from kernels.kronecker import kronecker_embedding``). Importing this package runs nothing.
"""
