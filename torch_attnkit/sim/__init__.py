"""Simulators of the architectures that this machine lacks, with the interfaces of ``core/runtimes.py``."""
