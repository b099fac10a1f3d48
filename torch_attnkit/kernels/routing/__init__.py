"""The experts of tokens, and their weights."""
