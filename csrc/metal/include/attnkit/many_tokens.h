// Routed experts of many tokens.
