"""Quintet post-trains language, vision-language and vision-language-action models by reinforcement learning."""

__version__ = "0.1.0"
