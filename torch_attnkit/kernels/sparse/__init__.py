"""Attention of tokens that each have keys of their own: a window, and entries that a list names."""
