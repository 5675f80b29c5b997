"""The loop, and the process around it."""
