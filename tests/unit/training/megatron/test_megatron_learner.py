"""If these fail, the Megatron learner learns something else than the plain one, or depends on how ranks share it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from five_steps import OBJECTIVE, RATE, TOLD, batch, experiment, main, steps
from safetensors.torch import load_file

from quintet.algorithms.objective import CriticObjective
from quintet.config.native import AlgorithmConfig, CriticConfig
from quintet.policies.causal_lm import ValueModel, load_model
from quintet.training.learner import ActorLearner, CriticLearner, Scorer
from quintet.training.megatron.opening import (
    open_megatron_actor,
    open_megatron_critic,
    open_megatron_reference,
)
from quintet.training.packing import Budget
from quintet.training.ranks import Ranks
from quintet.training.sharded_state import moments

SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
RANKS = [
    ("qwen2", {"parallel": {"tensor": 2}}),
    ("qwen3", {"parallel": {"tensor": 2, "sequence": True}}),
    ("llama", {"megatron": {**SHARDED, "ddp_bucket_size": 3000}}),
    ("qwen2", {"parallel": {"pipeline": 2}, "megatron": {"batch_p2p_comm": True}}),
    ("deep", {"parallel": {"pipeline": 2, "virtual_pipeline": 2}}),
    ("llama", {"parallel": {"pipeline": 2}, "megatron": {"variable_seq_lengths": False, "seq_length": 96}}),
    ("llama", {"parallel": {"context": 2}}),
    ("experts", {"parallel": {"expert": 2}}),
    ("experts", {"parallel": {"expert": 2}, "megatron": {"moe_token_dispatcher_type": "allgather"}}),
]
ONE = [
    ("llama", {}),
    ("biased", {"megatron": {"add_bias_linear": True}}),
    ("experts", {"megatron": {"moe_layer_recompute": True}}),
    (
        "llama",
        {"megatron": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}},
    ),
    (
        "llama",
        {"megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}},
    ),
    ("llama", {"megatron": {"recompute_granularity": "selective", "use_distributed_optimizer": True}}),
    ("qwen3", {"gradient_checkpointing": True, "optimizer": {"kind": "sgd"}}),
]


def plain(policy: Path, settings: dict[str, Any]) -> ActorLearner:
    return ActorLearner(load_model(policy), experiment(settings).actor.optimizer, budget=Budget(60))


def compare(policy: Path, settings: dict[str, Any], told: list[list[dict[str, float]]], out: Path) -> None:
    """Loss, norms, weights and moments against the plain learner's."""
    learner = plain(policy, settings)
    given = batch(learner.model.config.vocab_size)
    before = learner.scorer.logprobs(given)
    expected = steps(learner, given)
    for each in told:
        for ours, theirs in zip(each, expected, strict=True):
            for name in TOLD:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=2e-6), name
    weights, state = load_file(out / "weights.safetensors"), load_file(out / "state.safetensors")
    torch.testing.assert_close(weights.pop("logprobs"), before, atol=5e-6, rtol=0)
    same(weights, dict(learner.weights()))
    same(state, moments(learner.lay.module, learner.optimizer))


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    gap = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in theirs)
    size = sum(float(tensor.double().square().sum()) for tensor in theirs.values())
    assert gap**0.5 <= 1e-5 * size**0.5


@pytest.fixture(scope="module")
def on_two_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes made of all of `RANKS`, one after the other."""
    root = tmp_path_factory.mktemp("ranks")
    program, cases = Path(__file__).parent / "five_steps.py", json.dumps(RANKS)
    start = [sys.executable, "-W", "ignore", program, models, root]
    given = [root / "meeting", cases]
    processes = [subprocess.Popen([*start, str(rank), "2", *given], stderr=subprocess.PIPE) for rank in range(2)]
    try:
        for process in processes:
            _, said = process.communicate(timeout=400)
            assert process.returncode == 0, said.decode()[-3000:]
    finally:
        for process in processes:
            process.kill()
    return root


@pytest.mark.parametrize("number", range(len(RANKS)), ids=[f"{kind}-{json.dumps(what)}" for kind, what in RANKS])
def test_five_steps_on_two_ranks_are_the_plain_learners(models: Path, on_two_ranks: Path, number: int) -> None:
    kind, settings = RANKS[number]
    told = [json.loads((on_two_ranks / f"{number}.{rank}.json").read_text()) for rank in range(2)]
    compare(models / kind, settings, told, on_two_ranks / str(number))


@pytest.mark.parametrize(("kind", "settings"), ONE, ids=lambda value: json.dumps(value))
def test_five_steps_alone_are_the_plain_learners(
    models: Path, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    main(models / kind, tmp_path / "out", Ranks(), settings)
    told = [json.loads((tmp_path / "out.0.json").read_text())]
    compare(models / kind, settings, told, tmp_path / "out")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_float32_weights_beside_and_learns_the_same_way(models: Path, dtype: str) -> None:
    flag = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    learner = open_megatron_actor(experiment({"policy": {"dtype": dtype}, "megatron": {flag: True}}), models / "llama")
    given = batch(99)
    told = steps(learner, given)
    expected = steps(plain(models / "llama", {}), given)
    assert {tensor.dtype for _, tensor in learner.weights()} == {torch.float32}
    assert told[-1]["actor/pg_loss"] == pytest.approx(expected[-1]["actor/pg_loss"], abs=0.02)
    assert [step["skipped"] for step in told] == [0.0] * 5


def test_a_float16_step_that_overflows_is_skipped_and_the_scale_falls(models: Path) -> None:
    settings = {"policy": {"dtype": "float16"}, "megatron": {"fp16": True, "loss_scale_window": 1}}
    learner = open_megatron_actor(experiment(settings), models / "llama")
    scaler, given = learner._optimizer.chained_optimizers[0].grad_scaler, batch(99)
    scaler._scale.fill_(2.0**40)
    weights = {name: tensor.clone() for name, tensor in learner.weights()}
    skipped = [learner.update(given, OBJECTIVE, "token-mean", RATE)["skipped"] for _ in range(2)]
    assert skipped == [1.0, 1.0]
    assert float(scaler.scale) == 2.0**39  # Megatron forgives the first overflow
    assert all(torch.equal(weights[name], tensor) for name, tensor in learner.weights())
    scaler._scale.fill_(2.0**10)
    assert learner.update(given, OBJECTIVE, "token-mean", RATE)["skipped"] == 0.0
    assert float(scaler.scale) == 2.0**11  # a window of one step


def test_a_gradient_that_isnt_finite_is_skipped_and_counted(models: Path) -> None:
    learner, given = open_megatron_actor(experiment({}), models / "llama"), batch(99)
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    given.advantages[:] = float("nan")
    assert learner.update(given, OBJECTIVE, "token-mean", RATE)["skipped"] == 1.0
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.weights())


def test_norms_and_biases_dont_decay(models: Path) -> None:
    settings = {"optimizer": {"weight_decay": 0.5, "kind": "sgd"}}
    learner, given = open_megatron_actor(experiment(settings), models / "qwen2"), batch(99)
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    given.advantages[:] = 0.0
    learner.update(given, OBJECTIVE.__class__(AlgorithmConfig()), "token-mean", 0.1)
    for name, tensor in learner.weights():
        kept = "norm" in name or name.endswith("bias")
        torch.testing.assert_close(tensor, before[name] * (1.0 if kept else 0.95), msg=name)


def test_routers_that_are_frozen_stay_as_they_are(models: Path) -> None:
    settings = {"policy": {"freeze_router": True}}
    learner = open_megatron_actor(experiment(settings), models / "experts")
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    learner.update(batch(99), OBJECTIVE, "token-mean", RATE)
    for name, tensor in learner.weights():
        assert torch.equal(before[name], tensor) == (".mlp.gate." in name), name


def test_weights_and_moments_go_on_in_another_learner(models: Path) -> None:
    first, given = open_megatron_actor(experiment({}), models / "qwen3"), batch(99)
    steps(first, given, 2)
    weights = {name: tensor.clone() for name, tensor in first.weights()}
    settings = {"megatron": {"use_distributed_optimizer": True}}
    second, third = open_megatron_actor(experiment(settings), models / "qwen3"), plain(models / "qwen3", {})
    second.load_weights(weights)
    second.load_state(first.state())
    for name, parameter in third.model.named_parameters():
        parameter.data.copy_(weights[name])
    held, state = dict(third.lay.module.named_parameters()), first.state()
    for key, value in state.items():
        name, field = key.rsplit(".", 1)
        third.optimizer.state[held[f"policy.{name}"]][field] = value.clone()
    expected = steps(first, given, 2)
    for other in (second, third):
        for ours, theirs in zip(steps(other, given, 2), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    same(dict(second.weights()), {name: tensor.clone() for name, tensor in first.weights()})


def test_transformers_reads_what_was_saved(models: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    learner = open_megatron_actor(experiment({}), models / "qwen2")
    steps(learner, batch(99), 1)
    learner.save_pretrained(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    same(dict(model.named_parameters()), dict(learner.weights()))


def test_the_critic_learns_as_the_plain_one(models: Path) -> None:
    config, given = experiment({}), batch(99)
    ours = open_megatron_critic(config, models / "llama")
    theirs = CriticLearner(ValueModel(load_model(models / "llama")), config.critic.optimizer, budget=Budget(60))
    objective = CriticObjective(CriticConfig(value_clip=0.3))
    for _ in range(3):
        one, two = (each.update(given, objective, "token-mean", RATE) for each in (ours, theirs))
        assert one["critic/vf_loss"] == pytest.approx(two["critic/vf_loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)
    torch.testing.assert_close(ours.values(given), theirs.values(given), atol=1e-5, rtol=1e-4)


def test_the_full_divergence_is_measured_and_learnt_from(models: Path) -> None:
    from quintet.algorithms.objective import PolicyObjective
    from quintet.config.native import KlConfig

    config, given = experiment({}), batch(99)
    objective = PolicyObjective(AlgorithmConfig(kl=KlConfig(place="loss", estimator="full", coefficient=0.5)))
    ours, theirs = open_megatron_actor(config, models / "llama"), plain(models / "llama", {})
    reference = open_megatron_reference(config, models / "llama")
    known = Scorer(load_model(models / "llama"), budget=Budget(60))
    for _ in range(2):
        one = ours.update(given, objective, "token-mean", RATE, reference=reference)
        two = theirs.update(given, objective, "token-mean", RATE, reference=known)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)
    whole = ours.scorer.divergence(given, reference, swapped=True)
    torch.testing.assert_close(whole, theirs.scorer.divergence(given, known, swapped=True), atol=1e-6, rtol=1e-4)
    mass = ours.scorer.frozen(Budget(60)).squared_mass(given)
    torch.testing.assert_close(mass, theirs.scorer.squared_mass(given), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared", [False, True])
def test_two_optimizers_take_turns_on_the_same_weights(models: Path, dtype: str, shared: bool) -> None:
    """A warm start has its own; what it learnt isn't lost, not even behind the digits of bfloat16."""
    settings = {"policy": {"dtype": dtype}, "megatron": {"use_distributed_optimizer": shared}}
    learner, given = open_megatron_actor(experiment(settings), models / "llama"), batch(99)
    practice = learner.under(experiment(settings).actor.optimizer)
    alone = open_megatron_actor(experiment(settings), models / "llama")
    for each in (practice, alone):
        steps(each, given, 2)
    learnt = {name: tensor.clone() for name, tensor in learner.weights()}
    assert all(torch.equal(learnt[name], tensor) for name, tensor in alone.weights())
    learner.update(given, OBJECTIVE, "token-mean", RATE)
    assert any(not torch.equal(learnt[name], tensor) for name, tensor in learner.weights())
