"""What a user of vLLM gets with and without this package."""
