"""If these fail, what is learnt depends on how a batch was cut, or isn't what the model says."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from quintet.algorithms.objective import CriticObjective, Imitation, PolicyObjective
from quintet.config.native import AlgorithmConfig, CriticConfig, OptimizerConfig
from quintet.policies.causal_lm import ValueModel, load_model, recompute_activations, token_statistics
from quintet.records import Batch
from quintet.training.learner import ActorLearner, CriticLearner
from quintet.training.optimizer import learning_rate
from quintet.training.packing import Budget, micro_batches, mini_batches, select_trajectories


def ragged_batch(seed: int = 0) -> Batch:
    """Nine sequences of five trajectories, a common prompt, masks with gaps."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([12, 17, 9, 30, 21, 9, 14, 26, 11])
    shared = torch.arange(200, 206)
    tokens, masks, ends = [], [], []
    for length in lengths.tolist():
        rest = torch.randint(0, 300, (length - 6,), generator=generator)
        mask = torch.rand(length - 6, generator=generator) < 0.5
        mask[-1] = True
        tokens.append(torch.cat([shared, rest]))
        masks.append(torch.cat([torch.zeros(6, dtype=torch.bool), mask]))
        ends.append(torch.cat([torch.zeros(length - 1, dtype=torch.bool), torch.ones(1, dtype=torch.bool)]))
    mask = torch.cat(masks)
    size = len(mask)
    return Batch(
        tokens=torch.cat(tokens),
        positions=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        lengths=lengths,
        loss_mask=mask,
        turn=torch.zeros(size, dtype=torch.long),
        turn_end=torch.cat(ends),
        trajectory=torch.tensor([0, 0, 1, 1, 2, 3, 3, 4, 4]),
        group=torch.tensor([0, 0, 1, 1, 2]),
        logprobs=(torch.randn(size, generator=generator) * 0.3 - 5.5) * mask,
        rewards=torch.randn(size, generator=generator) * torch.cat(ends),
        advantages=torch.randn(size, generator=generator) * mask,
        values=torch.randn(size, generator=generator) * mask,
        returns=torch.randn(size, generator=generator) * mask,
    )


def learner(directory: Path, budget: Budget) -> ActorLearner:
    config = OptimizerConfig(learning_rate=1e-3)
    return ActorLearner(load_model(directory), config, budget=budget)


def test_packed_logprobs_are_those_of_transformers(policy_directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    batch = ragged_batch()
    ours = learner(policy_directory, Budget(70)).scorer.logprobs(batch)
    model = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float32).eval()
    start = 0
    for length in batch.lengths.tolist():
        tokens = batch.tokens[start : start + length]
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].log_softmax(-1)
        expected = torch.cat([torch.zeros(1), logits[:-1].gather(-1, tokens[1:, None]).squeeze(-1)])
        mask = batch.loss_mask[start : start + length]
        torch.testing.assert_close(ours[start : start + length], expected * mask, atol=2e-5, rtol=0)
        start += length


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("budget", [Budget(1), Budget(40), Budget(sequences=1), Budget(40, 2)])
def test_gradient_doesnt_depend_on_micro_batches(policy_directory: Path, aggregation: str, budget: Budget) -> None:
    batch, objective = ragged_batch(), PolicyObjective(AlgorithmConfig(entropy_coefficient=0.01))
    whole, cut = learner(policy_directory, Budget(10_000)), learner(policy_directory, budget)
    one = whole.update(batch, objective, aggregation, 1e-3)
    many = cut.update(batch, objective, aggregation, 1e-3)
    for name in ("actor/pg_loss", "actor/entropy", "grad_norm", "probs_diff_mean"):
        assert many[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), name


def test_the_same_update_twice_gives_the_same_bits(policy_directory: Path) -> None:
    batch, objective = ragged_batch(), PolicyObjective(AlgorithmConfig())
    results = []
    for _ in range(2):
        actor = learner(policy_directory, Budget(64))
        actor.update(batch, objective, "token-mean", 1e-3)
        results.append(dict(actor.weights()))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_an_update_raises_the_probability_of_good_tokens(policy_directory: Path) -> None:
    actor, batch = learner(policy_directory, Budget(64)), ragged_batch()
    before = actor.scorer.logprobs(batch)
    batch = replace(batch, logprobs=before)
    actor.update(batch, PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    change = (actor.scorer.logprobs(batch) - before)[batch.loss_mask]
    advantages = batch.advantages[batch.loss_mask]
    assert float((change * advantages).sum()) > 0


def test_on_policy_tokens_show_no_gap(policy_directory: Path) -> None:
    actor, batch = learner(policy_directory, Budget(64)), ragged_batch()
    batch = replace(batch, logprobs=actor.scorer.logprobs(batch))
    gap = actor.update(batch, PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    assert gap["probs_diff_max"] < 1e-6


def test_a_gradient_that_isnt_finite_is_skipped_and_counted(policy_directory: Path) -> None:
    actor, batch = learner(policy_directory, Budget(64)), ragged_batch()
    before = {name: value.clone() for name, value in actor.weights()}
    broken = replace(batch, advantages=batch.advantages * float("nan"))
    assert actor.update(broken, PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)["skipped"] == 1.0
    assert all(torch.equal(before[name], value) for name, value in actor.weights())


def test_imitation_lowers_its_loss(policy_directory: Path) -> None:
    actor, batch = learner(policy_directory, Budget(64)), ragged_batch()
    losses = [actor.update(batch, Imitation(), "token-mean", 1e-3)["sft/loss"] for _ in range(5)]
    assert losses[-1] < losses[0]


def test_the_critic_learns_its_returns(policy_directory: Path) -> None:
    config = OptimizerConfig(learning_rate=1e-3)
    critic = CriticLearner(ValueModel(load_model(policy_directory)), config, budget=Budget(64), dtype=torch.float32)
    batch = replace(ragged_batch(), values=torch.zeros(149))
    assert bool((critic.values(batch) == 0).all())  # the head starts at zero
    objective = CriticObjective(CriticConfig(value_clip=None))
    losses = [critic.update(batch, objective, "token-mean", 1e-3)["critic/vf_loss"] for _ in range(8)]
    assert losses[-1] < losses[0]


def test_optimizer_state_survives_a_round_trip(policy_directory: Path) -> None:
    batch, objective = ragged_batch(), PolicyObjective(AlgorithmConfig())
    first = learner(policy_directory, Budget(64))
    first.update(batch, objective, "token-mean", 1e-3)
    second = learner(policy_directory, Budget(64))
    second.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    second.load_state({name: value.clone() for name, value in first.state().items()})
    for actor in (first, second):
        actor.update(batch, objective, "token-mean", 1e-3)
    resumed = dict(second.weights())
    assert all(torch.equal(value, resumed[name]) for name, value in first.weights())


def test_mini_batches_keep_groups_whole_and_lose_nothing() -> None:
    batch = ragged_batch()
    parts = list(mini_batches(batch, 1, torch.Generator().manual_seed(0)))
    assert sorted(int(part.trajectory[0]) // 2 for part in parts) == [0, 1, 2]
    assert sum(len(part.tokens) for part in parts) == len(batch.tokens)
    for part in parts:
        assert len(torch.unique(batch.group[part.trajectory])) == 1


def test_without_shuffling_mini_batches_come_in_their_own_order() -> None:
    batch = ragged_batch()
    parts = [torch.unique(batch.group[part.trajectory]).tolist() for part in mini_batches(batch, 2, None)]
    assert parts == [[0, 1], [2]]


def test_micro_batches_predict_every_own_token_once() -> None:
    batch = ragged_batch()
    seen = torch.cat([micro.index for micro in micro_batches(batch, Budget(40))])
    assert sorted(seen.tolist()) == batch.loss_mask.nonzero().squeeze(-1).tolist()


def test_selected_trajectories_keep_their_tokens() -> None:
    batch = ragged_batch()
    kept = select_trajectories(batch, torch.tensor([False, True, False, False, True]))
    assert kept.lengths.tolist() == [9, 30, 26, 11]
    assert kept.trajectory.tolist() == [1, 1, 4, 4]
    assert torch.equal(kept.tokens[:39], batch.tokens[29:68])


def test_the_schedule_by_hand() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule="linear", min_learning_rate_ratio=0.0)
    assert [learning_rate(config, step, 6) for step in range(1, 7)] == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])
    share = OptimizerConfig(learning_rate=1.0, warmup_steps=0, warmup_ratio=0.2, schedule="constant")
    assert [learning_rate(share, step, 10) for step in (1, 2, 3)] == [0.5, 1.0, 1.0]
    cosine = OptimizerConfig(learning_rate=1.0, warmup_steps=0, schedule="cosine", min_learning_rate_ratio=0.2)
    assert learning_rate(cosine, 5, 10) == pytest.approx(0.6)
    assert learning_rate(cosine, 10, 10) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({"warmup_steps": 4, "warmup_start": 0.2, "schedule": "constant"}, {1: 0.4, 4: 1.0, 9: 1.0}),
        ({"schedule": "cosine", "cycles": 1.0}, {5: 0.0, 10: 1.0}),
        ({"schedule": "linear", "decay_steps": 4}, {2: 0.5, 4: 0.0, 9: 0.0}),
        ({"schedule": "inverse_square_root", "warmup_steps": 4}, {4: 1.0, 16: 0.5}),
        ({"schedule": "wsd", "stable_decay_steps": 4}, {6: 1.0, 8: 2 * 0.5**0.5 - 1, 10: 0.0}),
        ({"schedule": "wsd", "stable_decay_steps": 4, "stable_decay": "minus_sqrt"}, {7: 0.5, 10: 0.0}),
        ({"schedule": "wsd", "stable_decay_steps": 4, "stable_decay": "cosine"}, {8: 0.5, 10: 0.0}),
        ({"schedule": "wsd", "stable_decay_steps": 4, "stable_decay": "linear"}, {7: 0.75, 10: 0.0}),
    ],
)
def test_further_schedules_by_hand(changes: dict[str, object], rates: dict[int, float]) -> None:
    config = OptimizerConfig.model_validate(
        {"learning_rate": 1.0, "warmup_steps": 0, "min_learning_rate_ratio": 0.0} | changes
    )
    assert {step: learning_rate(config, step, 10) for step in rates} == pytest.approx(rates)


def test_recomputed_activations_take_less_memory_and_give_the_same_gradient(policy_directory: Path) -> None:
    def learn(model: PreTrainedModel) -> tuple[int, list[torch.Tensor]]:
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        (micro,) = micro_batches(ragged_batch(), Budget(10_000))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs, _ = token_statistics(model, micro.packed)
        held = sum(kept.values())
        torch.autograd.backward(logprobs.sum())
        return held, [p.grad for p in model.parameters() if p.grad is not None]

    plain, saving = load_model(policy_directory), load_model(policy_directory)
    recompute_activations(saving)
    (held, expected), (held_less, found) = learn(plain), learn(saving)
    assert held_less < held
    torch.testing.assert_close(found, expected)


def test_mini_batches_of_games_may_cut_groups() -> None:
    """Where a step's games fill its updates but its groups don't."""
    batch = ragged_batch()
    parts = list(mini_batches(batch, 2, torch.Generator().manual_seed(0), whole_groups=False))
    assert [len(torch.unique(part.trajectory)) for part in parts] == [2, 2, 1]
    assert sum(len(part.tokens) for part in parts) == len(batch.tokens)
