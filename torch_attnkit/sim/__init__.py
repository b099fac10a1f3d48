"""Simulators of the architectures that this machine lacks, behind the same two seams as the hardware."""
