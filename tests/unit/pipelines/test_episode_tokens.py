"""If these fail, the viewer colors tokens by values of other tokens, or a run computes statistics nobody asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quintet.config.compose import load_experiment
from quintet.pipelines.episode_tokens import with_tokens
from quintet.pipelines.experience import collate_rollout
from quintet.pipelines.rollout_step import Rollout
from quintet.records import Batch, FinishReason, Outcome, Trajectory, Turn
from quintet.tracking.trajectories import write_trajectories
from quintet.training.packing import select_trajectories

SETTINGS = ("tracking.token_statistics=true", "tracking.trajectories_every_steps=2")


def turn(prompt: tuple[int, ...], tokens: tuple[int, ...], *, continues: bool = False) -> Turn:
    return Turn("obs", prompt, continues, tokens, (-0.5,) * len(tokens), 0, "a", (), True, 1.0, FinishReason.STOP)


def episode(group: int, *turns: Turn, outcome: Outcome = Outcome.SUCCESS) -> Trajectory:
    return Trajectory("frozenlake", group, group, 0, turns, outcome)


class Scorer:
    """Scorer whose log-prob of a token is minus its id, and whose entropy is a hundredth of it."""

    calls = 0

    def compute_log_probs(self, batch: Batch) -> torch.Tensor:
        self.calls += 1
        return -batch.tokens.float() * batch.loss_mask

    def compute_entropies(self, batch: Batch) -> torch.Tensor:
        return batch.tokens.float() * batch.loss_mask / 100


def components(*settings: str) -> Any:
    scorer = Scorer()
    config = load_experiment(None, [*SETTINGS, *settings]).experiment
    return SimpleNamespace(config=config, learners=SimpleNamespace(policy_scorer=lambda step: scorer)), scorer


@pytest.fixture
def rollout() -> Rollout:
    return Rollout(
        [
            episode(0, turn((1, 2), (10, 11)), turn((3,), (12,), continues=True), turn((4, 5), (13, 14, 15))),
            episode(1, turn((1,), (20,)), outcome=Outcome.FAILED),
            episode(2, turn((1, 2), (30, 31))),
        ],
        {},
    )


def test_each_token_gets_its_statistics_and_untrained_episodes_have_no_advantages(
    rollout: Rollout, tmp_path: Path
) -> None:
    rollout_components, _ = components()
    batch = collate_rollout(rollout, rollout_components.config)
    trained = select_trajectories(batch, torch.tensor([True, False]))
    trained = replace(trained, advantages=trained.tokens.float() * 2)
    tokens = with_tokens(rollout_components, rollout, trained, 2).tokens
    path = tmp_path / "step.jsonl"
    write_trajectories(path, 2, "train", rollout.trajectories, tokens=tokens)
    first, failed, last = map(json.loads, path.read_text().splitlines())
    assert [each["learner_logprobs"] for each in first["turns"]] == [[-10, -11], [-12], [-13, -14, -15]]
    assert [each["entropies"] for each in first["turns"]] == [[0.1, 0.11], [0.12], [0.13, 0.14, 0.15]]
    assert [each["advantages"] for each in first["turns"]] == [[20, 22], [24], [26, 28, 30]]
    assert failed["turns"][0]["tokens"] == [20]
    assert "entropies" not in failed["turns"][0]
    assert last["turns"][0]["learner_logprobs"] == [-30, -31]
    assert "advantages" not in last["turns"][0]


def test_nothing_is_computed_in_other_steps_or_unless_asked_for(rollout: Rollout) -> None:
    for settings, step in ((), 3), (("tracking.token_statistics=false",), 2):
        rollout_components, scorer = components(*settings)
        batch = collate_rollout(rollout, rollout_components.config)
        assert with_tokens(rollout_components, rollout, batch, step) is rollout
        assert scorer.calls == 0
