"""Block-scaled 4-bit numbers: quantised, and read back."""
