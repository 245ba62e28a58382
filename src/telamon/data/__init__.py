"""From files to batches: sources, tokenizer, token cache, order, packing, loader."""
