"""Telamon: train large language models on JAX, and write with them, from a laptop to a cluster."""

__version__ = "0.1.0"
