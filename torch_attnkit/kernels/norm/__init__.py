"""RMS norms of rows."""
