"""The largest entries of rows."""
