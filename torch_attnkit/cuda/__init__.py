"""Toolkit for CuTeDSL kernels: compiling, caching, loading, and the pieces that kernels share. It knows no op.

``compile``, ``driver`` and ``warmup`` import neither cutlass nor a kernel until something has to be compiled.
"""
