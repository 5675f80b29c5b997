"""Checkpoint number formats."""
