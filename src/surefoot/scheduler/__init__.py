"""Who runs next. Plain Python: no torch, clock, random or I/O."""
