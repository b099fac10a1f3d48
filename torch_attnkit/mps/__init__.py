"""Toolkit of the Metal kernels: from source text to a library, and from a library to a launch. It knows no op."""
