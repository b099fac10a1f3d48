"""Products of groups on Blackwell: those by ``mma.sync`` alone."""
