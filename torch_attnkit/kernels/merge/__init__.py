"""Partial attentions over disjoint keys, combined by their LSE."""
