"""Checkpoints: written in the background, whole or not there, checked before they are trusted."""
