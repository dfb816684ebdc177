"""If these fail, what a policy or its critic learns depends on micro-batch size, packing or the number of processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import loss_grid
import pytest
import torch
from loss_grid import (
    AGGREGATIONS,
    LOSSES,
    TOLD,
    TOLD_OF_VALUES,
    critic,
    critic_grid,
    grid,
    learner,
    near_batch,
    objective,
    ragged_batch,
    three_steps,
    three_steps_of_values,
)

from quintet.algorithms.aggregation import Aggregation, token_weights
from quintet.config.native.losses import LOSSES as REGISTRY
from quintet.records import Batch
from quintet.training.packing import MicroBatchBudget

Told = dict[str, list[float]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads wait for each other longer than passes as small as these take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(policy_directory: Path) -> Told:
    """The mini-batch in a single pass."""
    return grid(learner(policy_directory, MicroBatchBudget()))


@pytest.fixture(scope="module")
def whole_of_values(policy_directory: Path) -> Told:
    """The critic's mini-batch in a single pass."""
    return critic_grid(critic(policy_directory, MicroBatchBudget()))


def same(ours: Told, theirs: Told) -> None:
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


def test_the_grid_covers_each_loss() -> None:
    assert sorted(LOSSES) == sorted(entry.name for entry in REGISTRY)


def test_losses_and_aggregations_differ_in_the_grid(whole: Told) -> None:
    """Else equal numbers would prove nothing."""
    first = {name: tuple(round(value, 7) for value in values) for name, values in whole.items()}
    own = {name for name in LOSSES if REGISTRY.get(name).load() and name not in ("gmpo", "sapo")}
    for name in own:
        assert len({first[f"{name} {mode}"] for mode in AGGREGATIONS}) == len(AGGREGATIONS), name
    for mode in AGGREGATIONS:
        assert len({first[f"{name} {mode}"] for name in LOSSES}) == len(LOSSES) - 1  # gpg and reinforce are one


@pytest.mark.parametrize(
    "budget",
    [MicroBatchBudget(60), MicroBatchBudget(max_sequences=2), MicroBatchBudget(max_sequences=1)],
    ids=["tokens", "sequences", "unpacked"],
)
def test_micro_batch_size_does_not_change_updates(
    policy_directory: Path, whole: Told, whole_of_values: Told, budget: MicroBatchBudget
) -> None:
    same(grid(learner(policy_directory, budget)), whole)
    same(critic_grid(critic(policy_directory, budget)), whole_of_values)


def test_aggregations_differ_in_the_critics_grid(whole_of_values: Told) -> None:
    told = {name: dict(zip(TOLD_OF_VALUES, values, strict=True)) for name, values in whole_of_values.items()}
    assert len({round(one["critic/vf_loss"], 7) for one in told.values()}) == 2 * len(AGGREGATIONS)
    assert len({round(one["grad_norm"], 7) for one in told.values()}) == 2 * len(AGGREGATIONS)
    assert 0.1 < told["all token-mean"]["critic/vf_clipfrac"] < 0.9


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_packed_critic_updates_agree_with_padded_ones(policy_directory: Path, whole_of_values: Told, mode: str) -> None:
    """Against a plain forward pass of transformers over padded rows, and the loss written out."""
    from transformers import AutoModelForCausalLM

    head = critic(policy_directory, MicroBatchBudget()).model.head
    body = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float32).eval().model
    batch = ragged_batch()
    assert batch.values is not None
    assert batch.returns is not None
    rows, seen, own = padded(batch)
    hidden = body(input_ids=rows, attention_mask=seen.long()).last_hidden_state[:, :-1]
    found = head(hidden).squeeze(-1)[own]
    old, wanted = batch.values[batch.loss_mask], batch.returns[batch.loss_mask]
    near = torch.clamp(found, old - 0.3, old + 0.3)
    weights = token_weights(mode, batch.loss_mask, batch.token_trajectory, 64.0)[batch.loss_mask]
    loss = (0.5 * torch.maximum((found - wanted) ** 2, (near - wanted) ** 2) * weights).sum()
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_([*body.parameters(), *head.parameters()], 1e9)
    expected = whole_of_values[f"all {mode}"]
    assert loss.item() == pytest.approx(expected[0], rel=1e-5)
    assert norm.item() == pytest.approx(expected[2], rel=1e-5)


def padded(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens and what is no padding, [sequences, longest]; own tokens by their predictors' places, one shorter."""
    lengths = batch.lengths.tolist()
    rows = torch.nn.utils.rnn.pad_sequence(batch.tokens.split(lengths), batch_first=True)
    own = torch.nn.utils.rnn.pad_sequence(batch.loss_mask.split(lengths), batch_first=True)[:, 1:]
    return rows, torch.arange(rows.shape[1]) < batch.lengths[:, None], own


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_packed_updates_agree_with_padded_ones(policy_directory: Path, whole: Told, name: str) -> None:
    """Against a plain forward pass of transformers over padded rows."""
    from transformers import AutoModelForCausalLM

    actor = learner(policy_directory, MicroBatchBudget())
    batch = near_batch(actor.scorer)
    model = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float32).eval()
    other = loss_grid.other_policy(model)
    rows, seen, own = padded(batch)
    now = model(rows, attention_mask=seen.long()).logits[:, :-1].log_softmax(-1)
    with torch.no_grad():
        theirs = other(rows, attention_mask=seen.long()).logits[:, :-1].log_softmax(-1)
    logprobs = now.gather(-1, rows[:, 1:, None]).squeeze(-1)[own]
    entropy = -(now.exp() * now).sum(-1)[own]
    wanted = objective(name)
    targets = wanted.targets(batch, Aggregation("seq-mean-token-mean"), logprobs=actor.scorer.compute_log_probs, seed=3)
    targets = replace(targets, divergence=(now.exp() * (now - theirs)).sum(-1)[own])
    loss, metrics = wanted(logprobs, entropy, targets)
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    told = {**metrics, "grad_norm": norm}
    expected = dict(zip(TOLD, whole[f"{name} seq-mean-token-mean"], strict=True))
    for key in TOLD[:-1]:
        assert told[key].item() == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key


def test_two_processes_train_as_one(policy_directory: Path, whole: Told, whole_of_values: Told, tmp_path: Path) -> None:
    alone = learner(policy_directory, MicroBatchBudget())
    before = float(alone.scorer.compute_log_probs(near_batch(alone.scorer)).sum())
    after = three_steps(alone)
    command = [sys.executable, str(Path(__file__).parents[2] / "support" / "loss_grid.py"), str(policy_directory)]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path / "meeting")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    first, second = (json.loads(answer) for answer in answers)
    assert first == second
    same(first["grid"], whole)
    same(first["values"], whole_of_values)
    one = three_steps_of_values(critic(policy_directory, MicroBatchBudget()))
    assert abs(one[1] - one[0]) > 0.1
    assert first["value"] == pytest.approx(one, rel=1e-5)
    same({"cispo token-mean": first["once"]}, {"cispo token-mean": whole["cispo token-mean"]})
    assert abs(after - before) > 0.1
    assert first["probability"] == pytest.approx(after, rel=1e-5)
