"""What was decided: settings, model, hardware, and the one plan that they resolve to. No torch."""
