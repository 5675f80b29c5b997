"""Load for OpenAI-compatible servers, and what they make of it: HTTP only."""
