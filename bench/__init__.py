"""Benches of the ops: ``python -m bench OP [--peers]``. Every number stands on a parity check of the same inputs."""
