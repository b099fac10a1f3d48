"""Gradients of RMS norms of rows."""
