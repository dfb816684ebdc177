"""ROLL: pipelines of workers."""
