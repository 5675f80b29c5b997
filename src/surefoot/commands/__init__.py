"""What each command of the command line does: one module each, but for `serve`, which is `surefoot.launch`."""
