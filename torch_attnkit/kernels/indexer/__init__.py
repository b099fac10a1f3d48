"""Scores of cache entries by weighted, rectified products with the heads of an indexer."""
