"""If these fail, the policy on the robot's state is not RLinf's, so that its weights and settings do not transfer."""

from __future__ import annotations

import torch
from tests.support.robot_policies import ACTION_DIM, STATE_DIM, observe

from quintet.embodied_records import ActionSampling
from quintet.policies.vla.mlp_policy import MlpConfig, MlpPolicy

NAMES = {
    **{f"backbone.{layer}.{part}": None for layer in (0, 2, 4) for part in ("weight", "bias")},
    **{f"value_head.mlp.{layer}.{part}": None for layer in (0, 2, 4) for part in ("weight", "bias")},
    **dict.fromkeys(("value_head.mlp.6.weight", "actor_mean.weight", "actor_mean.bias", "actor_logstd")),
}


def test_weights_have_the_names_and_the_initial_values_of_rlinf() -> None:
    config = MlpConfig(obs_dim=STATE_DIM, action_dim=ACTION_DIM, add_value_head=True)
    policy = MlpPolicy(config)
    assert policy.state_dict().keys() == NAMES.keys()
    assert policy.actor_logstd.tolist() == [[-0.5] * ACTION_DIM]
    product = policy.backbone[2].weight @ policy.backbone[2].weight.T
    assert torch.allclose(product, 2 * torch.eye(256), atol=1e-4)
    assert torch.allclose(policy.actor_mean.weight.norm(dim=1), torch.tensor(0.01 * 2**0.5), atol=1e-6)


def test_log_probs_are_those_of_rlinf_for_the_same_weights() -> None:
    """The formula of the reference: an MLP with tanh, a normal distribution, and a separate MLP for values."""
    policy = MlpPolicy(MlpConfig(obs_dim=STATE_DIM, action_dim=ACTION_DIM, add_value_head=True))
    inputs = policy.prepare(observe(5))
    weights, hidden, values = policy.state_dict(), inputs["state"], inputs["state"]
    for layer in (0, 2, 4):
        hidden = torch.tanh(hidden @ weights[f"backbone.{layer}.weight"].T + weights[f"backbone.{layer}.bias"])
        name = f"value_head.mlp.{layer}"
        values = torch.tanh(values @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
    mean = hidden @ weights["actor_mean.weight"].T + weights["actor_mean.bias"]
    expected = torch.distributions.Normal(mean, weights["actor_logstd"].exp().expand_as(mean))
    sample = policy.sample(inputs, torch.rand(5, 1, ACTION_DIM), ActionSampling())
    statistics = policy.statistics(inputs, sample.actions, ActionSampling())
    assert torch.allclose(statistics.logprobs[:, 0], expected.log_prob(sample.actions[:, 0]), atol=1e-5)
    assert torch.allclose(statistics.entropies[:, 0], expected.entropy(), atol=1e-5)
    assert torch.allclose(sample.values, values @ weights["value_head.mlp.6.weight"].T, atol=1e-5)
