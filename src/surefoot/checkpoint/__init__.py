"""Checkpoint files: finding, fetching and reading them. No torch."""
