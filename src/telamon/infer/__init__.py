"""Turning a model into text: sampling, batched generation, stop strings."""
