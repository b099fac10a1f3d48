"""For Hopper."""
