"""If these fail, a key of the learner has no effect on a policy of robots."""

from __future__ import annotations

import pytest
import torch
from robot_policies import build_action_policy, observe, robot_experiment

from quintet.embodied_records import ActionSampling
from quintet.errors import ConfigError
from quintet.runtime.embodied.robot_learner import build_policy_learner
from quintet.training.chunk_learner import ChunkLearner, ChunkRates
from quintet.training.parallel.process_group import RankGroup


def build(preset: str, *, recomputes: bool) -> ChunkLearner:
    config = robot_experiment(
        {"preset": preset, "kind": "mlp" if "mlp" in preset else "openvla_oft", "vla": {"action_chunk": 2}},
        actor={"gradient_checkpointing": recomputes},
        training={"threads": 1},
    )
    return build_policy_learner(config, build_action_policy(config), config.actor.optimizer, RankGroup())


def test_recomputed_activations_give_the_same_update() -> None:
    passes, updated = [], []
    for recomputes in (False, True):
        learner = build("arm-vla", recomputes=recomputes)
        inputs = learner.policy.prepare(observe(4))
        actions = learner.sample(inputs, None, ActionSampling()).actions
        count: list[int] = []
        attention = learner.policy.language_model.model.layers[0].self_attn
        attention.register_forward_hook(lambda *_, count=count: count.append(1))
        metrics = learner.clone(inputs, actions, torch.ones(4, 2, dtype=torch.bool), ChunkRates(1e-2, 1e-2, 0.0))
        updated.append((metrics, dict(learner.policy.named_parameters())))
        passes.append(len(count))
    assert passes == [1, 2]
    (metrics, weights), (again, recomputed) = updated
    assert again == pytest.approx(metrics, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(recomputed[name], weight, atol=1e-5, rtol=0)


def test_a_policy_without_layers_to_recompute_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"actor\.gradient_checkpointing = true: MlpPolicy does not support"):
        build("state-mlp", recomputes=True)
