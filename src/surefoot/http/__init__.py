"""What a client sees."""
