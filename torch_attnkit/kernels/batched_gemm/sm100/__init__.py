"""Products of groups on Blackwell: of FP4 numbers by ``tcgen05.mma`` with block scales; others are by ``mma.sync``."""
