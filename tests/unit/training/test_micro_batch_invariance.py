"""If these fail, what a policy or its critic learns depends on micro-batch size, packing or the number of processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import loss_grid
import pytest
import torch
from loss_grid import (
    AGGREGATIONS,
    CRITIC_METRICS,
    LOSSES,
    METRICS,
    critic,
    critic_grid,
    grid,
    learner,
    near_batch,
    objective,
    ragged_batch,
    three_critic_steps,
    three_steps,
)
from rank_processes import run_ranks

from quintet.algorithms.aggregation import Aggregation, token_weights
from quintet.config.native.losses import LOSSES as REGISTRY
from quintet.records import Batch
from quintet.training.packing import MicroBatchBudget

Grid = dict[str, list[float]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: passes as small as these take less time than the synchronization of two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def single_pass(policy_directory: Path) -> Grid:
    """Results with the mini-batch in a single pass."""
    return grid(learner(policy_directory, MicroBatchBudget()))


@pytest.fixture(scope="module")
def critic_single_pass(policy_directory: Path) -> Grid:
    """Results of the critic with the mini-batch in a single pass."""
    return critic_grid(critic(policy_directory, MicroBatchBudget()))


def assert_close(actual: Grid, expected: Grid) -> None:
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


def test_the_grid_covers_each_loss() -> None:
    assert sorted(LOSSES) == sorted(entry.name for entry in REGISTRY)


def test_losses_and_aggregations_differ_in_the_grid(single_pass: Grid) -> None:
    """Otherwise equal numbers would prove nothing."""
    first = {name: tuple(round(value, 7) for value in values) for name, values in single_pass.items()}
    aggregated = {name for name in LOSSES if REGISTRY.get(name).load() and name not in ("gmpo", "sapo")}
    for name in aggregated:
        assert len({first[f"{name} {mode}"] for mode in AGGREGATIONS}) == len(AGGREGATIONS), name
    for mode in AGGREGATIONS:
        assert len({first[f"{name} {mode}"] for name in LOSSES}) == len(LOSSES) - 1  # gpg and reinforce are one


@pytest.mark.parametrize(
    "budget",
    [MicroBatchBudget(60), MicroBatchBudget(max_sequences=2), MicroBatchBudget(max_sequences=1)],
    ids=["tokens", "sequences", "unpacked"],
)
def test_micro_batch_size_does_not_change_updates(
    policy_directory: Path, single_pass: Grid, critic_single_pass: Grid, budget: MicroBatchBudget
) -> None:
    assert_close(grid(learner(policy_directory, budget)), single_pass)
    assert_close(critic_grid(critic(policy_directory, budget)), critic_single_pass)


def test_aggregations_differ_in_the_critics_grid(critic_single_pass: Grid) -> None:
    metrics = {name: dict(zip(CRITIC_METRICS, values, strict=True)) for name, values in critic_single_pass.items()}
    assert len({round(one["critic/vf_loss"], 7) for one in metrics.values()}) == 2 * len(AGGREGATIONS)
    assert len({round(one["grad_norm"], 7) for one in metrics.values()}) == 2 * len(AGGREGATIONS)
    assert 0.1 < metrics["all token-mean"]["critic/vf_clipfrac"] < 0.9


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_packed_critic_updates_agree_with_padded_ones(
    policy_directory: Path, critic_single_pass: Grid, mode: str
) -> None:
    """Compare with a forward pass of transformers over padded rows, and the loss written out."""
    from transformers import AutoModelForCausalLM

    head = critic(policy_directory, MicroBatchBudget()).model.head
    body = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float32).eval().model
    batch = ragged_batch()
    assert batch.values is not None
    assert batch.returns is not None
    rows, attention_mask, loss_mask = padded(batch)
    hidden = body(input_ids=rows, attention_mask=attention_mask.long()).last_hidden_state[:, :-1]
    values = head(hidden).squeeze(-1)[loss_mask]
    old, returns = batch.values[batch.loss_mask], batch.returns[batch.loss_mask]
    clipped = torch.clamp(values, old - 0.3, old + 0.3)
    weights = token_weights(mode, batch.loss_mask, batch.token_trajectory, 64.0)[batch.loss_mask]
    loss = (0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) * weights).sum()
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_([*body.parameters(), *head.parameters()], 1e9)
    expected = critic_single_pass[f"all {mode}"]
    assert loss.item() == pytest.approx(expected[0], rel=1e-5)
    assert norm.item() == pytest.approx(expected[2], rel=1e-5)


def padded(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens and attention mask, [sequences, longest], and the loss mask at the predicting positions, one
    shorter."""
    lengths = batch.lengths.tolist()
    rows = torch.nn.utils.rnn.pad_sequence(batch.tokens.split(lengths), batch_first=True)
    loss_mask = torch.nn.utils.rnn.pad_sequence(batch.loss_mask.split(lengths), batch_first=True)[:, 1:]
    return rows, torch.arange(rows.shape[1]) < batch.lengths[:, None], loss_mask


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_packed_updates_agree_with_padded_ones(policy_directory: Path, single_pass: Grid, name: str) -> None:
    """Compare with a forward pass of transformers over padded rows."""
    from transformers import AutoModelForCausalLM

    actor = learner(policy_directory, MicroBatchBudget())
    batch = near_batch(actor.scorer)
    model = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float32).eval()
    reference = loss_grid.other_policy(model)
    rows, attention_mask, loss_mask = padded(batch)
    all_logprobs = model(rows, attention_mask=attention_mask.long()).logits[:, :-1].log_softmax(-1)
    with torch.no_grad():
        reference_logprobs = reference(rows, attention_mask=attention_mask.long()).logits[:, :-1].log_softmax(-1)
    logprobs = all_logprobs.gather(-1, rows[:, 1:, None]).squeeze(-1)[loss_mask]
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)[loss_mask]
    policy_objective = objective(name)
    targets = policy_objective.targets(
        batch, Aggregation("seq-mean-token-mean"), logprobs=actor.scorer.compute_log_probs, seed=3
    )
    targets = replace(targets, divergence=(all_logprobs.exp() * (all_logprobs - reference_logprobs)).sum(-1)[loss_mask])
    loss, metrics = policy_objective(logprobs, entropy, targets)
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    actual = {**metrics, "grad_norm": norm}
    expected = dict(zip(METRICS, single_pass[f"{name} seq-mean-token-mean"], strict=True))
    for key in METRICS[:-1]:
        assert actual[key].item() == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key


def test_two_processes_train_as_one(
    policy_directory: Path, single_pass: Grid, critic_single_pass: Grid, tmp_path: Path
) -> None:
    actor = learner(policy_directory, MicroBatchBudget())
    before = float(actor.scorer.compute_log_probs(near_batch(actor.scorer)).sum())
    after = three_steps(actor)
    first, second = map(json.loads, run_ranks("loss_grid.py", 2, tmp_path, policy_directory))
    assert first == second
    assert_close(first["grid"], single_pass)
    assert_close(first["values"], critic_single_pass)
    values = three_critic_steps(critic(policy_directory, MicroBatchBudget()))
    assert abs(values[1] - values[0]) > 0.1
    assert first["value"] == pytest.approx(values, rel=1e-5)
    assert_close({"cispo token-mean": first["once"]}, {"cispo token-mean": single_pass["cispo token-mean"]})
    assert abs(after - before) > 0.1
    assert first["probability"] == pytest.approx(after, rel=1e-5)
