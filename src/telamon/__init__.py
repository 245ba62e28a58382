"""Telamon: train, evaluate and serve large language models on JAX, from a laptop to a cluster."""

__version__ = "0.1.0"
