"""Rows of a key-value cache: written into slots, and gathered from them."""
