"""What is kept for the day after: ring and report formats. No torch."""
