"""Products of FP4 weights with the tokens that were routed to them."""
