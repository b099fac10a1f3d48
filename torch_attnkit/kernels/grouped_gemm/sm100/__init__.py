"""For Blackwell."""
