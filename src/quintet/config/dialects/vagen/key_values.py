"""The name of the environment in VAGEN's reference."""

ENV = "env1"
"""Section of an environment in the reference's env_config.yaml; users choose any name."""
