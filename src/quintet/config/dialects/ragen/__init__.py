"""RAGEN: multi-turn agents on text envs."""
