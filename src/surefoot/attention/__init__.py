"""Attention backends and the KV cache that they read."""
