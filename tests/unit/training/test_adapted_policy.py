"""If these fail, a policy with adapters plays, is compared with or is stored as another one than was trained."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loss_grid import ragged_batch
from torch import Tensor
from transformers import PreTrainedModel

from quintet.algorithms.objective import PolicyObjective
from quintet.config.native import AlgorithmConfig, Experiment, KlConfig, OptimizerConfig
from quintet.config.native.policy import LoraConfig
from quintet.policies.adapters import add_lora, merged_weights, read_adapters, save_adapters
from quintet.policies.causal_lm import load_model
from quintet.records import Batch, Request
from quintet.rollout.hf import HfEngine, _own_copy
from quintet.runtime.learners import open_critic, open_reference
from quintet.training.kept import KeptPolicy
from quintet.training.learner import ActorLearner, Scorer
from quintet.training.packing import Budget, select_sequences
from quintet.training.sharded_state import moments

EVERYWHERE = LoraConfig(rank=2, alpha=3.0)
NOWHERE = Path("/nowhere")
"""Weights that lie whole in a learner aren't read again."""
EXPERIMENT = Experiment.model_validate({"policy": {"lora": {"rank": 2, "alpha": 3.0}}})


@pytest.fixture
def untied(policy_directory: Path, tmp_path: Path) -> Path:
    """A policy whose head is a matrix of its own, so that adapters may lie beside it."""
    model = load_model(policy_directory, overrides={"tie_word_embeddings": False})
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.01)
    model.save_pretrained(tmp_path / "untied")
    return tmp_path / "untied"


def adapted(directory: Path, config: LoraConfig = EVERYWHERE, *, random: bool = True) -> PreTrainedModel:
    model = load_model(directory)
    add_lora(model, config, seed=1)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if random and ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def actor_of(model: PreTrainedModel) -> ActorLearner:
    return ActorLearner(model, OptimizerConfig(), budget=Budget(64))


def learnt(actor: ActorLearner, steps: int = 2) -> ActorLearner:
    for _ in range(steps):
        actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-2)
    return actor


def named(model: PreTrainedModel, *, adapters: bool) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if (".lora_" in n) == adapters}


def test_only_adapters_learn_and_have_moments(policy_directory: Path) -> None:
    model = adapted(policy_directory)
    base, own = named(model, adapters=False), named(model, adapters=True)
    actor = learnt(actor_of(model))
    assert all(torch.equal(value, base[name]) for name, value in named(model, adapters=False).items())
    assert not any(torch.equal(value, own[name]) for name, value in named(model, adapters=True).items())
    assert {name.rpartition(".")[0] for name in moments(actor.lay.module, actor.optimizer)} == set(own)


@pytest.mark.parametrize("modules", [("all-linear",), ("lm_head", "embed_tokens", "q_proj")])
def test_the_engine_is_sent_the_merged_weights_and_the_model_stays(untied: Path, modules: tuple[str, ...]) -> None:
    model = adapted(untied, LoraConfig(rank=2, alpha=3.0, target_modules=modules))
    before, expected = named(model, adapters=False) | named(model, adapters=True), merged_weights(model)
    sent = dict(actor_of(model).weights())
    assert set(sent) == {name for name, _ in load_model(untied).named_parameters()}
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
    after = named(model, adapters=False) | named(model, adapters=True)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_in_this_process_plays_with_the_adapters(policy_directory: Path, dtype: torch.dtype) -> None:
    """The learner finds the words of the engine as likely as the engine did, before and after it learnt."""
    actor = actor_of(adapted(policy_directory))
    shared = dtype is torch.float32
    engine = HfEngine(
        actor.model if shared else _own_copy(actor.model, dtype), slots=4, context=64, shared=shared, prefill_tokens=32
    )
    assert engine._passes._decoder is not None  # the fast forward pass knows adapters
    for version in (1, 2):
        engine.load_weights(version, actor.weights())
        prompt = (5, 9, 11, 3, 8)
        engine.submit(Request(id=0, prompt=prompt, max_tokens=12, seed=3, temperature=1.0))
        written = next(found for _ in range(64) for found in engine.step())
        batch = _as_batch(prompt, written.tokens)
        found = actor.scorer.logprobs(batch)[batch.loss_mask]
        torch.testing.assert_close(found, torch.tensor(written.logprobs), atol=1e-4 if shared else 0.15, rtol=0)
        learnt(actor)


def _as_batch(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Batch:
    tokens = torch.tensor([*prompt, *answer])
    whole = select_sequences(ragged_batch(), torch.tensor([0]))
    size, mask = len(tokens), torch.arange(len(tokens)) >= len(prompt)
    zeros = torch.zeros(size)
    return replace(
        whole,
        tokens=tokens,
        positions=torch.arange(size),
        lengths=torch.tensor([size]),
        loss_mask=mask,
        turn=torch.zeros(size, dtype=torch.long),
        turn_end=torch.zeros(size, dtype=torch.bool),
        logprobs=zeros,
        rewards=zeros,
        advantages=zeros,
    )


@pytest.mark.parametrize("modules", [("all-linear",), ("lm_head", "embed_tokens", "q_proj")])
def test_the_reference_is_the_policy_as_it_was_without_a_copy_of_it(untied: Path, modules: tuple[str, ...]) -> None:
    """Held against a deep copy: log-probs alone, the divergence over the vocabulary, and inside an update."""
    actor, batch = actor_of(adapted(untied, LoraConfig(rank=2, alpha=3.0, target_modules=modules))), ragged_batch()
    copied = Scorer(copy.deepcopy(actor.model), budget=Budget(64))
    kept = open_reference(EXPERIMENT, actor, NOWHERE)
    assert isinstance(kept, KeptPolicy)
    assert kept.model is actor.model
    learnt(actor)
    torch.testing.assert_close(kept.logprobs(batch), copied.logprobs(batch), atol=1e-5, rtol=0)
    assert float((kept.logprobs(batch) - actor.scorer.logprobs(batch)).abs().max()) > 1e-3
    for swapped in (False, True):
        ours, theirs = (actor.scorer.divergence(batch, one, swapped=swapped) for one in (kept, copied))
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    objective = PolicyObjective(AlgorithmConfig(kl=KlConfig(place="loss", estimator="full", coefficient=0.1)))
    metrics = actor.update(batch, objective, "token-mean", 1e-3, reference=kept)
    assert metrics["actor/kl_loss"] > 0


def test_the_learner_is_as_it_was_after_the_reference_judged(policy_directory: Path) -> None:
    actor = actor_of(adapted(policy_directory))
    kept = open_reference(EXPERIMENT, actor, NOWHERE)
    learnt(actor)
    before = named(actor.model, adapters=True)
    kept.logprobs(ragged_batch())
    kept.state()
    assert all(torch.equal(value, before[name]) for name, value in named(actor.model, adapters=True).items())


def test_without_anything_learnt_the_reference_is_the_base_model(policy_directory: Path) -> None:
    actor = actor_of(adapted(policy_directory, random=False))
    kept = open_reference(EXPERIMENT, actor, NOWHERE)
    learnt(actor)
    base = actor_of(load_model(policy_directory)).scorer.logprobs(ragged_batch())
    torch.testing.assert_close(kept.logprobs(ragged_batch()), base, atol=1e-6, rtol=0)


def test_a_reference_and_adapters_come_back_from_files(policy_directory: Path, tmp_path: Path) -> None:
    actor = actor_of(adapted(policy_directory))
    kept = open_reference(EXPERIMENT, actor, NOWHERE)
    learnt(actor)
    save_adapters(actor.model, tmp_path, policy_directory, actor.adapters())
    again = actor_of(adapted(policy_directory, random=False))
    other = open_reference(EXPERIMENT, again, NOWHERE)
    again.lay.load(read_adapters(again.adapters(), tmp_path))
    other.load_state(kept.state())
    batch = ragged_batch()
    assert torch.equal(again.scorer.logprobs(batch), actor.scorer.logprobs(batch))
    assert torch.equal(other.logprobs(batch), kept.logprobs(batch))
    assert len(kept.state()) == 28  # adapters alone


def test_a_critic_grown_from_an_adapted_policy_is_plain_and_whole(policy_directory: Path) -> None:
    actor = actor_of(adapted(policy_directory))
    critic = open_critic(EXPERIMENT, actor, NOWHERE)
    names = dict(critic.model.named_parameters())
    assert not any("lora" in name or "base_layer" in name for name in names)
    assert all(parameter.requires_grad for parameter in names.values())
    expected = merged_weights(actor.model)["model.layers.1.mlp.up_proj.weight"]
    torch.testing.assert_close(names["body.layers.1.mlp.up_proj.weight"].detach(), expected)
