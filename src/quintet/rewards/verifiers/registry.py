"""Built-in verifiers."""

from __future__ import annotations

from quintet.registry import Registry
from quintet.rewards.score import Score

VERIFIERS: Registry[Score] = Registry("verifier", entry_points="quintet.verifiers")
"""Functions `(text, ground_truth, extra) -> Score`, run in worker processes; see `quintet.rewards.score.Verifier`."""
VERIFIERS.add_file(__file__, "verifiers.yaml")
