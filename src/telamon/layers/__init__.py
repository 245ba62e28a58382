"""Blocks' parts: norms, rotary embedding, attention, MLP. Each file reads like its paper."""
