"""Text to tokens and back, and the engine seen from the frontend. No torch."""
