"""Which implementation of attention and cross-entropy runs where, each beside a plain reference."""
