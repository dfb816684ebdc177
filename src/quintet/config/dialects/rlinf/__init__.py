"""RLinf: reasoning and embodied policies."""
