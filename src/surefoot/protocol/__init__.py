"""What crosses a process: commands, events and step plans. Frozen, total, no torch."""
