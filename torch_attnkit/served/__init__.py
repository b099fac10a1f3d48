"""Which calls servers and transformers make of known models, and so which kernels: what ``warmup --models`` compiles.

``models.py`` is data: the sizes of published models. ``calls.py`` makes the calls of them that steps of a server and of
generate() consist of, on meta tensors.
"""
