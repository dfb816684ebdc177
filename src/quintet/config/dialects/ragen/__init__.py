"""RAGEN: multi-turn agents on text worlds."""
