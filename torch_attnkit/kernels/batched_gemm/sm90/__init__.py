"""Products of groups on Hopper: TMA loads and ``wgmma``."""
