"""If these fail, what is learnt depends on how a batch was cut, or isn't what the model says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_grid import near_batch, other_policy, ragged_batch
from transformers import PreTrainedModel

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, CrossEntropyObjective, PolicyObjective
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.learners import CriticConfig, OptimizerConfig
from quintet.policies import token_statistics
from quintet.policies.attention import PackedLayout
from quintet.policies.causal_lm import ValueModel
from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.model_loading import enable_activation_checkpointing, load_model
from quintet.policies.token_statistics import log_probs_and_entropy
from quintet.training.checkpoint.learner_state import restore_learner, snapshot_learner
from quintet.training.checkpoint.snapshot import HostBuffers
from quintet.training.learner import ActorLearner, CriticLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.optim.lr_schedule import learning_rate
from quintet.training.packing import (
    MicroBatchBudget,
    iter_micro_batches,
    mini_batches,
    select_sequences,
    select_trajectories,
)
from quintet.training.scorer import PolicyScorer


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads wait for each other longer than passes as small as these take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def learner(directory: Path, budget: MicroBatchBudget) -> ActorLearner:
    config = OptimizerConfig(learning_rate=1e-3)
    return ActorLearner(load_model(directory), config, LearnerSetup(budget=budget))


def test_packed_log_probs_agree_with_transformers(policy_directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    batch = ragged_batch()
    ours = learner(policy_directory, MicroBatchBudget(70)).scorer.compute_log_probs(batch)
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
@pytest.mark.parametrize(
    "budget", [MicroBatchBudget(1), MicroBatchBudget(40), MicroBatchBudget(max_sequences=1), MicroBatchBudget(40, 2)]
)
def test_the_gradient_does_not_depend_on_micro_batches(
    policy_directory: Path, aggregation: str, budget: MicroBatchBudget
) -> None:
    batch, objective = ragged_batch(), PolicyObjective(AlgorithmConfig(entropy_coefficient=0.01))
    whole, cut = learner(policy_directory, MicroBatchBudget(10_000)), learner(policy_directory, budget)
    one = whole.update(batch, objective, aggregation, 1e-3)
    many = cut.update(batch, objective, aggregation, 1e-3)
    for name in ("actor/pg_loss", "actor/entropy", "grad_norm", "probs_diff_mean"):
        assert many[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), name


def test_the_same_update_twice_is_bit_equal(policy_directory: Path) -> None:
    batch, objective = ragged_batch(), PolicyObjective(AlgorithmConfig())
    results = []
    for _ in range(2):
        actor = learner(policy_directory, MicroBatchBudget(64))
        actor.update(batch, objective, "token-mean", 1e-3)
        results.append(dict(actor.weights()))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_an_update_raises_the_probability_of_tokens_with_positive_advantage(policy_directory: Path) -> None:
    actor, batch = learner(policy_directory, MicroBatchBudget(64)), ragged_batch()
    before = actor.scorer.compute_log_probs(batch)
    batch = replace(batch, logprobs=before)
    actor.update(batch, PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    change = (actor.scorer.compute_log_probs(batch) - before)[batch.loss_mask]
    advantages = batch.advantages[batch.loss_mask]
    assert float((change * advantages).sum()) > 0


def test_the_probability_gap_is_zero_on_policy(policy_directory: Path) -> None:
    actor, batch = learner(policy_directory, MicroBatchBudget(64)), ragged_batch()
    batch = replace(batch, logprobs=actor.scorer.compute_log_probs(batch))
    gap = actor.update(batch, PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    assert gap["probs_diff_max"] < 1e-6


def test_a_step_with_an_infinite_gradient_is_skipped_and_counted(policy_directory: Path) -> None:
    actor, batch = learner(policy_directory, MicroBatchBudget(64)), ragged_batch()
    before = {name: value.clone() for name, value in actor.weights()}
    broken = replace(batch, advantages=batch.advantages * float("nan"))
    assert actor.update(broken, PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)["skipped"] == 1.0
    assert all(torch.equal(before[name], value) for name, value in actor.weights())


def test_a_step_above_the_configured_gradient_norm_is_skipped(policy_directory: Path) -> None:
    config = OptimizerConfig(learning_rate=1e-3, skip_above_grad_norm=1e-6)
    actor = ActorLearner(load_model(policy_directory), config, LearnerSetup(budget=MicroBatchBudget(2000)))
    before = {name: value.clone() for name, value in actor.weights()}
    metrics = actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    assert metrics["skipped"] == 1.0
    assert metrics["grad_norm"] > 1e-6
    assert all(torch.equal(before[name], value) for name, value in actor.weights())


def test_imitation_lowers_its_loss(policy_directory: Path) -> None:
    actor, batch = learner(policy_directory, MicroBatchBudget(64)), ragged_batch()
    losses = [actor.update(batch, CrossEntropyObjective(), "token-mean", 1e-3)["sft/loss"] for _ in range(5)]
    assert losses[-1] < losses[0]


def test_the_critic_learns_its_returns(policy_directory: Path) -> None:
    config = OptimizerConfig(learning_rate=1e-3)
    critic = CriticLearner(
        ValueModel(load_model(policy_directory)), config, LearnerSetup(budget=MicroBatchBudget(64), dtype=torch.float32)
    )
    batch = replace(ragged_batch(), values=torch.zeros(149))
    assert bool((critic.compute_values(batch) == 0).all())  # the head starts at zero
    objective = CriticObjective(CriticConfig(value_clip=None))
    losses = [critic.update(batch, objective, "token-mean", 1e-3)["critic/vf_loss"] for _ in range(8)]
    assert losses[-1] < losses[0]


def test_a_restored_learner_continues_bit_equal(policy_directory: Path, tmp_path: Path) -> None:
    batch, objective = ragged_batch(), PolicyObjective(AlgorithmConfig())
    first = learner(policy_directory, MicroBatchBudget(64))
    first.update(batch, objective, "token-mean", 1e-3)
    second = learner(policy_directory, MicroBatchBudget(64))
    copies = snapshot_learner(first, "actor", ["model", "optimizer"], HostBuffers())
    weights = {name: tensor.clone() for name, tensor in first.weights()}
    first.update(batch, objective, "token-mean", 1e-3)
    copies.write(tmp_path)
    first.strategy.load_weights(weights.items())
    restore_learner(first, tmp_path, "actor", ["optimizer"])
    restore_learner(second, tmp_path, "actor", ["model", "optimizer"])
    for actor in (first, second):
        actor.update(batch, objective, "token-mean", 1e-3)
    resumed = dict(second.weights())
    assert all(torch.equal(value, resumed[name]) for name, value in first.weights())


def test_mini_batches_have_full_groups_and_every_trajectory() -> None:
    batch = ragged_batch()
    parts = list(mini_batches(batch, 1, torch.Generator().manual_seed(0)))
    assert sorted(int(part.trajectory[0]) // 2 for part in parts) == [0, 1, 2]
    assert sum(len(part.tokens) for part in parts) == len(batch.tokens)
    for part in parts:
        assert len(torch.unique(batch.group[part.trajectory])) == 1


def test_mini_batches_are_in_order_without_a_generator() -> None:
    batch = ragged_batch()
    parts = [torch.unique(batch.group[part.trajectory]).tolist() for part in mini_batches(batch, 2, None)]
    assert parts == [[0, 1], [2]]


def test_micro_batches_predict_each_response_token_once() -> None:
    batch = ragged_batch()
    seen = torch.cat([micro.index for micro in iter_micro_batches(batch, MicroBatchBudget(40))])
    assert sorted(seen.tolist()) == batch.loss_mask.nonzero().squeeze(-1).tolist()


def test_selected_trajectories_keep_their_tokens() -> None:
    batch = ragged_batch()
    kept = select_trajectories(batch, torch.tensor([False, True, False, False, True]))
    assert kept.lengths.tolist() == [9, 30, 26, 11]
    assert kept.trajectory.tolist() == [1, 1, 4, 4]
    assert torch.equal(kept.tokens[:39], batch.tokens[29:68])


def test_learning_rates_agree_with_a_hand_calculation() -> None:
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
        ({"schedule": "inverse_square_root", "warmup_steps": 4}, {4: 1.0, 9: 2 / 3}),
        ({"schedule": "inverse_square_root", "warmup_steps": 4, "decay_steps": 16}, {16: 0.5, 17: 0.0}),
        ({"schedule": "wsd", "stable_decay_steps": 4}, {6: 1.0, 8: 2 * 0.5**0.5 - 1, 10: 0.0}),
        ({"schedule": "wsd", "stable_decay_steps": 4, "stable_decay": "minus_sqrt"}, {7: 0.5, 10: 0.0}),
        ({"schedule": "wsd", "stable_decay_steps": 4, "stable_decay": "cosine"}, {8: 0.5, 10: 0.0}),
        ({"schedule": "wsd", "stable_decay_steps": 4, "stable_decay": "linear"}, {7: 0.75, 10: 0.0}),
    ],
)
def test_further_schedules_agree_with_a_hand_calculation(changes: dict[str, object], rates: dict[int, float]) -> None:
    config = OptimizerConfig.model_validate(
        {"learning_rate": 1.0, "warmup_steps": 0, "min_learning_rate_ratio": 0.0} | changes
    )
    assert {step: learning_rate(config, step, 10) for step in rates} == pytest.approx(rates)


def test_activation_checkpointing_saves_memory_and_gives_the_same_gradient(policy_directory: Path) -> None:
    def learn(model: PreTrainedModel) -> tuple[int, list[torch.Tensor]]:
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        (micro,) = iter_micro_batches(ragged_batch(), MicroBatchBudget(10_000))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs, _ = log_probs_and_entropy(model, micro.packed)
        held = sum(kept.values())
        torch.autograd.backward(logprobs.sum())
        return held, [p.grad for p in model.parameters() if p.grad is not None]

    plain, saving = load_model(policy_directory), load_model(policy_directory)
    enable_activation_checkpointing(saving)
    (held, expected), (held_less, found) = learn(plain), learn(saving)
    assert held_less < held
    torch.testing.assert_close(found, expected)


def test_mini_batches_of_trajectories_may_split_groups() -> None:
    """Where a step's episodes fill its updates but its groups don't."""
    batch = ragged_batch()
    parts = list(mini_batches(batch, 2, torch.Generator().manual_seed(0), "trajectory"))
    assert [len(torch.unique(part.trajectory)) for part in parts] == [2, 2, 1]
    assert sum(len(part.tokens) for part in parts) == len(batch.tokens)


def test_mini_batches_of_sequences_may_split_trajectories() -> None:
    batch = ragged_batch()
    parts = list(mini_batches(batch, 2, None, "sequence"))
    lengths = [part.lengths.tolist() for part in parts]
    assert lengths == [batch.lengths[start : start + 2].tolist() for start in range(0, len(batch.lengths), 2)]


def distributions(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs of the whole vocabulary before each token but the first, [length - 1, vocabulary]."""
    positions, layout = torch.arange(len(tokens)), PackedLayout(torch.tensor([len(tokens)]))
    logits: torch.Tensor = model.lm_head(compute_hidden_states(model.model, tokens, positions, layout))
    return logits[:-1].log_softmax(-1)


def test_the_full_divergence_is_the_sum_over_the_vocabulary(policy_directory: Path) -> None:
    actor, batch = learner(policy_directory, MicroBatchBudget(64)), ragged_batch()
    other = PolicyScorer(other_policy(actor.model), LearnerSetup(budget=MicroBatchBudget(40)))
    forth = actor.scorer.compute_divergence(batch, other)
    back = actor.scorer.compute_divergence(batch, other, swapped=True)
    mass, entropies = actor.scorer.compute_sum_squared_probs(batch), actor.scorer.compute_entropies(batch)
    start = 0
    for length in batch.lengths.tolist():
        part = slice(start, start + length)
        mask, tokens = batch.loss_mask[part][1:], batch.tokens[part]
        with torch.no_grad():
            p, q = distributions(actor.model, tokens), distributions(other.model, tokens)
        for found, expected in (
            (forth, (p.exp() * (p - q)).sum(-1)),
            (back, (q.exp() * (q - p)).sum(-1)),
            (mass, (2 * p).exp().sum(-1)),
            (entropies, -(p.exp() * p).sum(-1)),
        ):
            torch.testing.assert_close(found[part][1:], expected * mask, atol=1e-6, rtol=1e-4)
        start += length
    assert float(forth[batch.loss_mask].min()) > 0.0


@pytest.mark.parametrize("swapped", [False, True])
def test_the_full_divergence_in_the_loss_pulls_towards_the_reference(policy_directory: Path, swapped: bool) -> None:
    actor = learner(policy_directory, MicroBatchBudget(64))
    batch = replace(near_batch(actor.scorer), advantages=None, correction=None)
    reference = PolicyScorer(other_policy(actor.model), LearnerSetup(budget=MicroBatchBudget(64)))
    kl = {"estimator": "full", "coefficient": 1.0, "swapped": swapped}
    objective = PolicyObjective(AlgorithmConfig.model_validate({"kl": kl}))
    step_metrics = [actor.update(batch, objective, "token-mean", 5e-5, reference=reference) for _ in range(15)]
    losses = [metrics["actor/kl_loss"] for metrics in step_metrics]
    each = PolicyScorer(load_model(policy_directory), LearnerSetup(budget=MicroBatchBudget())).compute_divergence(
        batch, reference, swapped=swapped
    )
    assert losses[0] == pytest.approx(float(each.sum() / batch.loss_mask.sum()), rel=1e-4)
    assert losses[-1] < 0.8 * losses[0]
    with pytest.raises(ValueError, match="reference"):
        actor.update(batch, objective, "token-mean", 1e-3)


def test_chunked_logits_give_the_same_gradient(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(places: int) -> list[torch.Tensor]:
        model = load_model(policy_directory)
        monkeypatch.setattr(token_statistics, "MAX_LOGITS_IN_MEMORY", places * model.config.vocab_size)
        (micro,) = iter_micro_batches(ragged_batch(), MicroBatchBudget())
        actual = token_statistics.compute_token_statistics(
            model,
            micro.packed,
            0.7,
            token_statistics.compute_lazy_logits(other_policy(model), micro.packed),
            with_sum_squared_probs=True,
        )
        torch.autograd.backward((actual.logprobs + actual.entropy + actual.divergence).sum())
        return [*(x.detach() for x in actual), *(p.grad for p in model.parameters() if p.grad is not None)]

    torch.testing.assert_close(measure(5), measure(10_000), atol=1e-4, rtol=1e-4)


def test_a_step_beyond_the_stop_ratio_is_skipped(policy_directory: Path) -> None:
    actor = learner(policy_directory, MicroBatchBudget(64))
    batch = near_batch(actor.scorer)
    batch = replace(batch, logprobs=batch.logprobs - 1.0)  # every ratio is about e
    before = {name: value.clone() for name, value in actor.weights()}
    for bound, stopped in ((2.0, 1.0), (4.0, 0.0)):
        objective = PolicyObjective(AlgorithmConfig(stop_ratio=bound))
        metrics = actor.update(batch, objective, "token-mean", 1e-3)
        assert metrics["actor/ratio"] == pytest.approx(2.8, abs=0.2)
        assert (metrics["actor/stopped_updates"], metrics["skipped"]) == (stopped, 0.0)
        assert all(torch.equal(before[name], value) for name, value in actor.weights()) == bool(stopped)


def test_the_probability_gap_is_relative_to_the_engine(policy_directory: Path) -> None:
    actor = learner(policy_directory, MicroBatchBudget(64))
    batch = near_batch(actor.scorer)
    batch = replace(batch, rollout_logprobs=actor.scorer.compute_log_probs(batch))
    metrics = actor.update(batch, PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    assert metrics["probs_diff_max"] < 1e-6
    assert metrics["actor/ppo_kl"] != 0.0


def test_micro_batches_have_equal_weight_under_the_equal_aggregation(policy_directory: Path) -> None:
    """As other frameworks do; then the loss depends on the cut."""
    objective = PolicyObjective(AlgorithmConfig())

    def loss(budget: MicroBatchBudget, ways: Any) -> float:
        actor = learner(policy_directory, budget)
        batch = near_batch(actor.scorer)
        return actor.update(batch, objective, Aggregation(micro_batch_weights=ways), 0.0)["actor/pg_loss"]

    assert loss(MicroBatchBudget(max_sequences=1), "tokens") == pytest.approx(
        loss(MicroBatchBudget(), "exact"), rel=1e-5
    )
    assert loss(MicroBatchBudget(), "equal") == pytest.approx(loss(MicroBatchBudget(), "exact"), rel=1e-5)
    actor = learner(policy_directory, MicroBatchBudget(max_sequences=1))
    batch = near_batch(actor.scorer)
    each = [
        learner(policy_directory, MicroBatchBudget()).update(
            select_sequences(batch, torch.tensor([i])), objective, "token-mean", 0.0
        )
        for i in range(len(batch.lengths))
    ]
    by_hand = sum(told["actor/pg_loss"] for told in each) / len(each)
    assert loss(MicroBatchBudget(max_sequences=1), "equal") == pytest.approx(by_hand, rel=1e-5)
    assert loss(MicroBatchBudget(max_sequences=1), "equal") != pytest.approx(
        loss(MicroBatchBudget(), "exact"), rel=1e-3
    )


def test_the_critic_trains_on_masked_values_only(policy_directory: Path) -> None:
    config = OptimizerConfig(learning_rate=1e-3)
    critic = CriticLearner(ValueModel(load_model(policy_directory)), config, LearnerSetup(budget=MicroBatchBudget(64)))
    batch = replace(ragged_batch(), values=torch.zeros(149))
    objective = CriticObjective(CriticConfig(value_clip=None))
    metrics = critic.update(batch, objective, "token-mean", 0.0, batch.turn_end)
    chosen = batch.returns[batch.turn_end & batch.loss_mask]  # the head starts at zero
    assert metrics["critic/vf_loss"] == pytest.approx(float(0.5 * chosen.square().mean()), rel=1e-5)
    elsewhere = replace(batch, returns=torch.where(batch.turn_end, batch.returns, 1e6))
    assert critic.update(elsewhere, objective, "token-mean", 0.0, batch.turn_end) == metrics


def test_sgd_agrees_with_a_hand_calculation(policy_directory: Path) -> None:
    config = OptimizerConfig(kind="sgd", learning_rate=1.0, max_grad_norm=1e9)
    actor = ActorLearner(load_model(policy_directory), config, LearnerSetup(budget=MicroBatchBudget()))
    batch, before = near_batch(actor.scorer), actor.model.lm_head.weight.detach().clone()
    objective = PolicyObjective(AlgorithmConfig())
    actor.optimizer.zero_grad = lambda *, set_to_none: None  # type: ignore[method-assign, misc, assignment]
    actor.update(batch, objective, "token-mean", 0.5)
    grad = actor.model.lm_head.weight.grad
    torch.testing.assert_close(actor.model.lm_head.weight.detach(), before - 0.5 * grad)
    assert not actor.optimizer.state


@pytest.mark.parametrize("name", ["ppo", "clip_cov", "kl_cov", "decoupled_ppo", "gmpo"])
def test_a_mini_batch_without_response_tokens_changes_nothing(policy_directory: Path, name: str) -> None:
    actor = learner(policy_directory, MicroBatchBudget(64))
    batch = near_batch(actor.scorer)
    before = {key: value.clone() for key, value in actor.weights()}
    objective = PolicyObjective(AlgorithmConfig.model_validate({"loss": {"name": name}}))
    metrics = actor.update(replace(batch, loss_mask=batch.loss_mask & False), objective, "token-mean", 1e-3)
    assert (metrics["grad_norm"], metrics["skipped"]) == (0.0, 0.0)
    assert all(torch.equal(before[key], value) for key, value in actor.weights())
