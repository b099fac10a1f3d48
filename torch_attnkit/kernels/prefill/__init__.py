"""Attention of many queries per sequence: dense batches, packed sequences, and blocks at the end of a cache."""
