"""What a run needs and how fast it will be, known before it starts."""
