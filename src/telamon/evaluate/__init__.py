"""How good a model is: perplexity of texts."""
