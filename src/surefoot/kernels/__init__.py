"""One file per kernel: reference, then launcher, then fast path."""
