"""If these fail, the size of a micro-batch changes an update, or value head and policy are trained at wrong rates."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from quintet.algorithms.chunks.objective import ChunkObjective
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.embodied_records import ActionSample, ActionSampling, ActionStatistics, ChunkBatch
from quintet.policies.vla.action_module import ActionModule
from quintet.training.chunk_learner import ChunkLearner, ChunkRates
from quintet.training.learner_setup import LearnerSetup
from quintet.training.packing import MicroBatchBudget

CHUNK, DIM, BINS = 2, 3, 5
RATES = ChunkRates(policy=0.1, value_head=0.2, weight_decay=0.0)


class LinearPolicy(nn.Module):
    """Action tokens from a linear layer on the state."""

    action_chunk, action_dim, value_size, tokens_per_chunk = CHUNK, DIM, 1, 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, CHUNK * DIM * BINS)
        self.value_head = nn.Linear(4, 1)
        self.batches: list[int] = []

    def statistics(self, inputs: Mapping[str, Tensor], actions: Tensor, sampling: ActionSampling) -> ActionStatistics:
        self.batches.append(len(actions))
        logprobs = self.body(inputs["state"]).view(-1, CHUNK, DIM, BINS).log_softmax(-1)
        chosen = logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return ActionStatistics(chosen, entropies, self.value_head(inputs["state"]))

    def sample(self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, sampling: ActionSampling) -> ActionSample:
        raise NotImplementedError


def config() -> Experiment:
    return Experiment.model_validate(
        {
            "env": {"name": "simulator", "simulator": "arm"},
            "algorithm": {"advantage": {"name": "gae"}, "level": "chunk", "reward_level": "chunk"},
            "critic": {"shares_policy": True},
            "policy": {"preset": "arm-vla"},
        }
    )


def learner(max_chunks: int) -> ChunkLearner:
    setup = LearnerSetup(budget=MicroBatchBudget(max_sequences=max_chunks))
    module = ActionModule(LinearPolicy())  # type: ignore[arg-type]
    return ChunkLearner(module, OptimizerConfig(kind="sgd", learning_rate=0.1, max_grad_norm=100.0), setup)


def batch(chunks: int = 7) -> ChunkBatch:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(chunks, CHUNK, generator=generator) < 0.7
    mask[0] = False
    return ChunkBatch(
        inputs={"state": torch.randn(chunks, 4, generator=generator)},
        actions=torch.randint(0, BINS, (chunks, CHUNK, DIM), generator=generator),
        logprobs=torch.full((chunks, CHUNK, DIM), -1.6),
        rewards=torch.zeros(chunks, CHUNK),
        dones=torch.zeros(chunks, CHUNK, dtype=torch.bool),
        loss_mask=mask,
        loss_weights=mask.float(),
        group=torch.zeros(chunks, dtype=torch.long),
        values=torch.zeros(chunks, 1),
        advantages=torch.randn(chunks, 1, generator=generator),
        returns=torch.randn(chunks, 1, generator=generator),
    )


def weights(trained: ChunkLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trained.weights()}


def test_micro_batches_add_up_to_the_mini_batch() -> None:
    whole, parts = learner(100), learner(2)
    first, second = (each.update(batch(), ChunkObjective(config()), ActionSampling(), RATES) for each in (whole, parts))
    assert second == pytest.approx(first, rel=1e-5)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], tensor)


def test_chunks_without_a_trained_action_are_not_computed() -> None:
    trained = learner(100)
    trained.update(batch(), ChunkObjective(config()), ActionSampling(), RATES)
    expected = int(batch().loss_mask.any(1).sum())
    assert trained.policy.batches == [expected]  # type: ignore[attr-defined]
    assert expected < 7


def test_value_head_has_its_own_learning_rate() -> None:
    slow, fast = learner(100), learner(100)
    before = weights(slow)
    slow.update(batch(), ChunkObjective(config()), ActionSampling(), RATES)
    fast.update(batch(), ChunkObjective(config()), ActionSampling(), ChunkRates(0.1, 0.4, 0.0))
    name = "value_head.weight"
    torch.testing.assert_close(weights(fast)[name] - before[name], 2 * (weights(slow)[name] - before[name]))
    torch.testing.assert_close(weights(fast)["body.weight"], weights(slow)["body.weight"])


def test_policy_does_not_change_while_only_values_are_trained() -> None:
    trained = learner(100)
    before = weights(trained)
    rates = ChunkRates(0.1, 0.2, 0.0, trains_policy=False)
    trained.update(batch(), ChunkObjective(config()), ActionSampling(), rates)
    assert torch.equal(weights(trained)["body.weight"], before["body.weight"])
    assert not torch.equal(weights(trained)["value_head.weight"], before["value_head.weight"])


def test_cloning_raises_the_log_probs_of_demonstrated_actions_only() -> None:
    trained, data = learner(3), batch()
    mask = torch.ones(7, CHUNK, dtype=torch.bool)
    mask[:, 1] = False
    losses = [trained.clone(data.inputs, data.actions, mask, RATES)["sft/loss"] for _ in range(30)]
    assert losses[0] == pytest.approx(1.6, abs=0.5)
    assert losses[-1] < 0.8 * losses[0]
    head = weights(trained)["body.bias"].view(CHUNK, DIM, BINS) - weights(learner(3))["body.bias"].view(
        CHUNK, DIM, BINS
    )
    assert head[0].abs().max() > 0
    assert torch.equal(head[1], torch.zeros(DIM, BINS))


def test_log_probs_of_a_rollout_are_in_its_order() -> None:
    data = batch()
    assert torch.allclose(
        learner(2).compute_log_probs(data, ActionSampling()), learner(100).compute_log_probs(data, ActionSampling())
    )
