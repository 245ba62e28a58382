"""Models from elsewhere and to elsewhere: Hugging Face folders and repositories, GGUF files."""
