"""Weights that a checkpoint holds in few bits, shown as bfloat16: MXFP4, FP8 in blocks, INT4 in groups."""
