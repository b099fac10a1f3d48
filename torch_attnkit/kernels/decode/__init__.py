"""Attention of one query token per sequence over a cache, contiguous or in pages; on Metal of a few tokens."""
