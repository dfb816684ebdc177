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
from quintet.config.native.algorithm import AlgorithmConfig, KlConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.config.native.policy import LoraConfig
from quintet.policies.lora import BaseWeights, add_lora, iter_merged_weights, read_adapters, save_adapters
from quintet.policies.model_loading import load_model
from quintet.records import Batch, Request
from quintet.rollout.engines.hf.engine import HfEngine, _inference_model
from quintet.rollout.engines.weight_source import TensorWeights
from quintet.runtime.learners.learner_builders import build_critic, build_reference
from quintet.training.checkpoint.state_dict import optimizer_state_dict
from quintet.training.learner import ActorLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.packing import MicroBatchBudget, select_sequences
from quintet.training.reference_snapshot import ReferenceSnapshot
from quintet.training.scorer import PolicyScorer

EVERYWHERE = LoraConfig(rank=2, alpha=3.0)
NOWHERE = Path("/nowhere")
"""Weights that lie whole in a learner aren't read again."""
EXPERIMENT = Experiment.model_validate({"policy": {"lora": {"rank": 2, "alpha": 3.0}}})


@pytest.fixture
def untied(policy_directory: Path, tmp_path: Path) -> Path:
    """A policy whose head is a matrix of its own, so that adapters may lie beside it."""
    model = load_model(policy_directory)
    model.config.tie_word_embeddings = False
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
    return ActorLearner(model, OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget(64)))


def learnt(actor: ActorLearner, steps: int = 2) -> ActorLearner:
    for _ in range(steps):
        actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-2)
    return actor


def named(model: PreTrainedModel, *, adapters: bool) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if (".lora_" in n) == adapters}


def test_only_adapters_are_trained_and_have_optimizer_state(policy_directory: Path) -> None:
    model = adapted(policy_directory)
    base, own = named(model, adapters=False), named(model, adapters=True)
    actor = learnt(actor_of(model))
    assert all(torch.equal(value, base[name]) for name, value in named(model, adapters=False).items())
    assert not any(torch.equal(value, own[name]) for name, value in named(model, adapters=True).items())
    assert {name.rpartition(".")[0] for name in optimizer_state_dict(actor.strategy.module, actor.optimizer)} == set(
        own
    )


@pytest.mark.parametrize("modules", [("all-linear",), ("lm_head", "embed_tokens", "q_proj")])
def test_the_engine_gets_merged_weights_and_the_model_is_unchanged(untied: Path, modules: tuple[str, ...]) -> None:
    model = adapted(untied, LoraConfig(rank=2, alpha=3.0, target_modules=modules))
    before, expected = named(model, adapters=False) | named(model, adapters=True), dict(iter_merged_weights(model))
    sent = dict(actor_of(model).weights())
    assert set(sent) == {name for name, _ in load_model(untied).named_parameters()}
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
    after = named(model, adapters=False) | named(model, adapters=True)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("modules", [("all-linear",), ("lm_head", "embed_tokens", "q_proj")])
def test_an_engine_merges_new_adapters_into_the_weights_that_it_keeps(untied: Path, modules: tuple[str, ...]) -> None:
    actor = actor_of(adapted(untied, LoraConfig(rank=2, alpha=3.0, target_modules=modules)))
    base = BaseWeights()
    sent = [*actor.base_weights(), *actor.adapters()]
    for _ in range(2):
        merged, expected = dict(base.merge(sent, actor.adapter_scales())), dict(actor.weights())
        assert merged.keys() == expected.keys()
        assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())
        learnt(actor)
        sent = list(actor.adapters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_in_process_engine_generates_with_the_adapters(policy_directory: Path, dtype: torch.dtype) -> None:
    """The learner finds the words of the engine as likely as the engine did, before and after it learnt."""
    actor = actor_of(adapted(policy_directory))
    shared = dtype is torch.float32
    engine = HfEngine(
        actor.model if shared else _inference_model(actor.model, dtype),
        max_num_seqs=4,
        max_model_len=64,
        shares_learner_model=shared,
        prefill_tokens=32,
    )
    assert engine._runner._decoder is not None  # the fast forward pass knows adapters
    for version in (1, 2):
        engine.load_weights(version, TensorWeights(actor.weights(), actor.model))
        prompt = (5, 9, 11, 3, 8)
        engine.add_request(Request(id=0, prompt=prompt, max_tokens=12, seed=3, temperature=1.0))
        written = next(found for _ in range(64) for found in engine.step())
        batch = _as_batch(prompt, written.tokens)
        found = actor.scorer.compute_log_probs(batch)[batch.loss_mask]
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
def test_the_reference_snapshot_agrees_with_a_deep_copy(untied: Path, modules: tuple[str, ...]) -> None:
    """Held against a deep copy: log-probs alone, the divergence over the vocabulary, and inside an update."""
    actor, batch = actor_of(adapted(untied, LoraConfig(rank=2, alpha=3.0, target_modules=modules))), ragged_batch()
    copied = PolicyScorer(copy.deepcopy(actor.model), LearnerSetup(budget=MicroBatchBudget(64)))
    kept = build_reference(EXPERIMENT, actor, NOWHERE)
    assert isinstance(kept, ReferenceSnapshot)
    assert kept.model is actor.model
    learnt(actor)
    torch.testing.assert_close(kept.compute_log_probs(batch), copied.compute_log_probs(batch), atol=1e-5, rtol=0)
    assert float((kept.compute_log_probs(batch) - actor.scorer.compute_log_probs(batch)).abs().max()) > 1e-3
    for swapped in (False, True):
        ours, theirs = (actor.scorer.compute_divergence(batch, one, swapped=swapped) for one in (kept, copied))
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    objective = PolicyObjective(AlgorithmConfig(kl=KlConfig(apply_to="loss", estimator="full", coefficient=0.1)))
    metrics = actor.update(batch, objective, "token-mean", 1e-3, reference=kept)
    assert metrics["actor/kl_loss"] > 0


def test_scoring_with_the_reference_leaves_the_learner_unchanged(policy_directory: Path) -> None:
    actor = actor_of(adapted(policy_directory))
    kept = build_reference(EXPERIMENT, actor, NOWHERE)
    learnt(actor)
    before = named(actor.model, adapters=True)
    kept.compute_log_probs(ragged_batch())
    kept.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in named(actor.model, adapters=True).items())


def test_a_reference_without_training_is_the_base_model(policy_directory: Path) -> None:
    actor = actor_of(adapted(policy_directory, random=False))
    kept = build_reference(EXPERIMENT, actor, NOWHERE)
    learnt(actor)
    base = actor_of(load_model(policy_directory)).scorer.compute_log_probs(ragged_batch())
    torch.testing.assert_close(kept.compute_log_probs(ragged_batch()), base, atol=1e-6, rtol=0)


def test_reference_and_adapters_are_restored_from_files(policy_directory: Path, tmp_path: Path) -> None:
    actor = actor_of(adapted(policy_directory))
    kept = build_reference(EXPERIMENT, actor, NOWHERE)
    learnt(actor)
    save_adapters(actor.model, tmp_path, policy_directory, actor.adapters())
    again = actor_of(adapted(policy_directory, random=False))
    other = build_reference(EXPERIMENT, again, NOWHERE)
    again.strategy.load_weights(read_adapters(again.adapters(), tmp_path))
    other.load_state_dict(kept.state_dict())
    batch = ragged_batch()
    assert torch.equal(again.scorer.compute_log_probs(batch), actor.scorer.compute_log_probs(batch))
    assert torch.equal(other.compute_log_probs(batch), kept.compute_log_probs(batch))
    assert len(kept.state_dict()) == 28  # adapters alone


def test_a_critic_created_from_a_lora_policy_is_merged_and_fully_trained(policy_directory: Path) -> None:
    actor = actor_of(adapted(policy_directory))
    critic = build_critic(EXPERIMENT, actor, NOWHERE)
    names = dict(critic.model.named_parameters())
    assert not any("lora" in name or "base_layer" in name for name in names)
    assert all(parameter.requires_grad for parameter in names.values())
    expected = dict(iter_merged_weights(actor.model))["model.layers.1.mlp.up_proj.weight"]
    torch.testing.assert_close(names["body.layers.1.mlp.up_proj.weight"].detach(), expected)
