"""Run scripts and lists of overrides: read, never run."""
