"""Model architectures, built from a ModelSpec."""
