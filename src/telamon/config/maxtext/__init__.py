"""From MaxText's settings to a run's config, with a word on everything that could not be carried over."""
