"""Number and cube puzzles of RAGEN's releases of 2026."""
