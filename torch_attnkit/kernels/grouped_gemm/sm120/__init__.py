"""For GeForce RTX 50 and DGX Spark: block-scaled ``mma.sync``."""
