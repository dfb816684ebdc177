"""If these fail, updates of the Megatron learner differ from those of the torch learner, or depend on the ranks."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_steps import METRICS, OBJECTIVE, RATE, build_batch, experiment, main, train
from rank_processes import run_ranks
from safetensors.torch import load_file

from quintet.algorithms.objective import CriticObjective
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.learners import CriticConfig
from quintet.errors import MachineError
from quintet.policies.causal_lm import ValueModel
from quintet.policies.model_loading import load_model
from quintet.training.checkpoint.state_dict import optimizer_state_dict
from quintet.training.learner import ActorLearner, CriticLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.megatron.build import (
    build_megatron_actor,
    build_megatron_critic,
    build_megatron_reference,
)
from quintet.training.packing import MicroBatchBudget
from quintet.training.parallel.process_group import RankGroup
from quintet.training.scorer import PolicyScorer

SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
TWO_RANKS = [
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
SINGLE_RANK = [
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


def torch_learner(policy: Path, settings: dict[str, Any]) -> ActorLearner:
    return ActorLearner(
        load_model(policy), experiment(settings).actor.optimizer, LearnerSetup(budget=MicroBatchBudget(60))
    )


def assert_agrees_with_torch(
    policy: Path, settings: dict[str, Any], metrics_of_ranks: list[list[dict[str, float]]], out: Path
) -> None:
    """Compare loss, norms, weights and moments with those of the torch learner."""
    learner = torch_learner(policy, settings)
    batch = build_batch(learner.model.config.vocab_size)
    before = learner.scorer.compute_log_probs(batch)
    expected = train(learner, batch)
    for steps in metrics_of_ranks:
        for metrics, expected_metrics in zip(steps, expected, strict=True):
            for name in METRICS:
                assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5, abs=2e-6), name
    weights, state = load_file(out / "weights.safetensors"), load_file(out / "state.safetensors")
    torch.testing.assert_close(weights.pop("logprobs"), before, atol=5e-6, rtol=0)
    assert_close(weights, dict(learner.weights()))
    assert_close(state, optimizer_state_dict(learner.strategy.module, learner.optimizer))


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare the norm of all differences with the norm of all tensors."""
    assert actual.keys() == expected.keys()
    gap = sum(float((actual[name].double() - expected[name].double()).square().sum()) for name in expected)
    size = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    assert gap**0.5 <= 1e-5 * size**0.5


@pytest.fixture(scope="module")
def two_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the metrics, weights and optimizer state of all of `TWO_RANKS` on two ranks."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks("megatron_steps.py", 2, directory, models, directory, json.dumps(TWO_RANKS))
    return directory


@pytest.mark.proves(
    "rlinf",
    "actor.model.seq_length",
    "actor.model.batch_p2p_comm",
    "actor.model.variable_seq_lengths",
    "actor.model.moe_token_dispatcher_type",
    "actor.optim.use_distributed_optimizer",
    "actor.optim.overlap_grad_reduce",
    "actor.optim.overlap_param_gather",
    "actor.megatron.ddp_bucket_size",
)
@pytest.mark.proves(
    "roll",
    "actor_train.strategy_args.strategy_config.moe_token_dispatcher_type",
    "actor_train.strategy_args.strategy_config.overlap_grad_reduce",
)
@pytest.mark.parametrize(
    "number", range(len(TWO_RANKS)), ids=[f"{kind}-{json.dumps(settings)}" for kind, settings in TWO_RANKS]
)
def test_five_steps_on_two_ranks_agree_with_the_torch_learner(models: Path, two_ranks: Path, number: int) -> None:
    kind, settings = TWO_RANKS[number]
    metrics = [json.loads((two_ranks / f"{number}.{rank}.json").read_text()) for rank in range(2)]
    assert_agrees_with_torch(models / kind, settings, metrics, two_ranks / str(number))


@pytest.mark.proves(
    "rlinf",
    "actor.model.add_bias_linear",
    "actor.model.recompute_method",
    "actor.model.recompute_granularity",
    "actor.model.recompute_num_layers",
)
@pytest.mark.proves(
    "roll",
    "actor_train.strategy_args.strategy_config.recompute_granularity",
    "actor_train.strategy_args.strategy_config.moe_layer_recompute",
)
@pytest.mark.parametrize(("kind", "settings"), SINGLE_RANK, ids=lambda value: json.dumps(value))
def test_five_steps_on_one_rank_agree_with_the_torch_learner(
    models: Path, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    main(models / kind, tmp_path / "out", RankGroup(), settings)
    metrics = [json.loads((tmp_path / "out.0.json").read_text())]
    assert_agrees_with_torch(models / kind, settings, metrics, tmp_path / "out")


@pytest.mark.proves("rlinf", "actor.optim.bf16", "actor.optim.fp16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_has_float32_master_weights(models: Path, dtype: str) -> None:
    flag = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    learner = build_megatron_actor(experiment({"policy": {"dtype": dtype}, "megatron": {flag: True}}), models / "llama")
    batch = build_batch(99)
    actual = train(learner, batch)
    expected = train(torch_learner(models / "llama", {}), batch)
    assert {tensor.dtype for _, tensor in learner.weights()} == {torch.float32}
    assert actual[-1]["actor/pg_loss"] == pytest.approx(expected[-1]["actor/pg_loss"], abs=0.02)
    assert [step["skipped"] for step in actual] == [0.0] * 5


@pytest.mark.proves("rlinf", "actor.optim.loss_scale_window")
def test_a_float16_overflow_skips_the_step_and_lowers_the_scale(models: Path) -> None:
    settings = {"policy": {"dtype": "float16"}, "megatron": {"fp16": True, "loss_scale_window": 1}}
    learner = build_megatron_actor(experiment(settings), models / "llama")
    scaler, batch = learner._optimizer.chained_optimizers[0].grad_scaler, build_batch(99)
    scaler._scale.fill_(2.0**40)
    weights = {name: tensor.clone() for name, tensor in learner.weights()}
    skipped = [learner.update(batch, OBJECTIVE, "token-mean", RATE)["skipped"] for _ in range(2)]
    assert skipped == [1.0, 1.0]
    assert float(scaler.scale) == 2.0**39  # Megatron forgives the first overflow
    assert all(torch.equal(weights[name], tensor) for name, tensor in learner.weights())
    scaler._scale.fill_(2.0**10)
    assert learner.update(batch, OBJECTIVE, "token-mean", RATE)["skipped"] == 0.0
    assert float(scaler.scale) == 2.0**11  # a window of one step


def test_a_step_with_an_infinite_gradient_is_skipped_and_counted(models: Path) -> None:
    learner, batch = build_megatron_actor(experiment({}), models / "llama"), build_batch(99)
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    batch.advantages[:] = float("nan")
    assert learner.update(batch, OBJECTIVE, "token-mean", RATE)["skipped"] == 1.0
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.weights())


def test_norms_and_biases_have_no_weight_decay(models: Path) -> None:
    settings = {"optimizer": {"weight_decay": 0.5, "kind": "sgd"}}
    learner, batch = build_megatron_actor(experiment(settings), models / "qwen2"), build_batch(99)
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    batch.advantages[:] = 0.0
    learner.update(batch, OBJECTIVE.__class__(AlgorithmConfig()), "token-mean", 0.1)
    for name, tensor in learner.weights():
        has_no_decay = "norm" in name or name.endswith("bias")
        torch.testing.assert_close(tensor, before[name] * (1.0 if has_no_decay else 0.95), msg=name)


@pytest.mark.proves("verl", "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router")
def test_frozen_routers_do_not_change(models: Path) -> None:
    settings = {"policy": {"freeze_router": True}}
    learner = build_megatron_actor(experiment(settings), models / "experts")
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    learner.update(build_batch(99), OBJECTIVE, "token-mean", RATE)
    for name, tensor in learner.weights():
        assert torch.equal(before[name], tensor) == (".mlp.gate." in name), name


def test_weights_and_optimizer_state_move_to_another_learner(models: Path) -> None:
    first, batch = build_megatron_actor(experiment({}), models / "qwen3"), build_batch(99)
    train(first, batch, 2)
    weights = {name: tensor.clone() for name, tensor in first.weights()}
    settings = {"megatron": {"use_distributed_optimizer": True}}
    second, third = build_megatron_actor(experiment(settings), models / "qwen3"), torch_learner(models / "qwen3", {})
    second.load_weights(weights)
    second.load_optimizer_state_dict(first.optimizer_state_dict())
    for name, parameter in third.model.named_parameters():
        parameter.data.copy_(weights[name])
    parameters, state = dict(third.strategy.module.named_parameters()), first.optimizer_state_dict()
    for key, value in state.items():
        name, field = key.rsplit(".", 1)
        third.optimizer.state[parameters[f"policy.{name}"]][field] = value.clone()
    expected = train(first, batch, 2)
    for other in (second, third):
        for metrics, expected_metrics in zip(train(other, batch, 2), expected, strict=True):
            assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    assert_close(dict(second.weights()), {name: tensor.clone() for name, tensor in first.weights()})


def test_the_critic_agrees_with_the_torch_critic(models: Path) -> None:
    config, batch = experiment({}), build_batch(99)
    critic = build_megatron_critic(config, models / "llama")
    torch_critic = CriticLearner(
        ValueModel(load_model(models / "llama")), config.critic.optimizer, LearnerSetup(budget=MicroBatchBudget(60))
    )
    objective = CriticObjective(CriticConfig(value_clip=0.3))
    for _ in range(3):
        actual, expected = (learner.update(batch, objective, "token-mean", RATE) for learner in (critic, torch_critic))
        assert actual["critic/vf_loss"] == pytest.approx(expected["critic/vf_loss"], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    torch.testing.assert_close(critic.compute_values(batch), torch_critic.compute_values(batch), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "experts"])
def test_weights_of_another_learner_are_not_kept_in_full(models: Path, kind: str) -> None:
    """A large model does not fit into the memory of one device; at most queries, keys and values are there."""
    source, config, largest = build_megatron_actor(experiment({}), models / kind), experiment({}), 0
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal largest
        for name, tensor in source.weights():
            alive.add(copy := tensor.clone())
            del tensor
            largest = max(largest, len(alive))
            yield name, copy
            del copy

    source.update(build_batch(99), OBJECTIVE, "token-mean", RATE)
    reference = build_megatron_reference(config, models / kind, weights())
    critic = build_megatron_critic(config, models / kind, weights())
    assert largest <= 4
    assert torch.equal(reference.compute_log_probs(build_batch(99)), source.scorer.compute_log_probs(build_batch(99)))
    body = dict(critic.weights())
    assert all(torch.equal(body[name], tensor) for name, tensor in source.weights() if name in body)
    with pytest.raises(MachineError, match=r"lack decoder\.final_layernorm"):
        build_megatron_reference(config, models / kind, (item for item in weights() if item[0] != "model.norm.weight"))


def test_the_full_divergence_is_computed_and_trained_on(models: Path) -> None:
    from quintet.algorithms.objective import PolicyObjective
    from quintet.config.native.algorithm import KlConfig

    config, batch = experiment({}), build_batch(99)
    objective = PolicyObjective(AlgorithmConfig(kl=KlConfig(apply_to="loss", estimator="full", coefficient=0.5)))
    learner, expected_learner = build_megatron_actor(config, models / "llama"), torch_learner(models / "llama", {})
    reference = build_megatron_reference(config, models / "llama")
    torch_reference = PolicyScorer(load_model(models / "llama"), LearnerSetup(budget=MicroBatchBudget(60)))
    for _ in range(2):
        actual = learner.update(batch, objective, "token-mean", RATE, reference=reference)
        expected = expected_learner.update(batch, objective, "token-mean", RATE, reference=torch_reference)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    divergence = learner.scorer.compute_divergence(batch, reference, swapped=True)
    torch.testing.assert_close(
        divergence,
        expected_learner.scorer.compute_divergence(batch, torch_reference, swapped=True),
        atol=1e-6,
        rtol=1e-4,
    )
    mass = learner.scorer.compute_sum_squared_probs(batch)
    torch.testing.assert_close(mass, expected_learner.scorer.compute_sum_squared_probs(batch), atol=1e-6, rtol=1e-5)
    entropies = learner.scorer.compute_entropies(batch)
    torch.testing.assert_close(entropies, expected_learner.scorer.compute_entropies(batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared", [False, True])
def test_two_optimizers_can_alternate_on_the_same_weights(models: Path, dtype: str, shared: bool) -> None:
    """A warm start has its own optimizer. Its updates are kept, even those smaller than the rounding of bfloat16."""
    settings = {"policy": {"dtype": dtype}, "megatron": {"use_distributed_optimizer": shared}}
    learner, batch = build_megatron_actor(experiment(settings), models / "llama"), build_batch(99)
    warm_start = learner.with_optimizer(experiment(settings).actor.optimizer)
    other = build_megatron_actor(experiment(settings), models / "llama")
    for actor in (warm_start, other):
        train(actor, batch, 2)
    trained = {name: tensor.clone() for name, tensor in learner.weights()}
    assert all(torch.equal(trained[name], tensor) for name, tensor in other.weights())
    learner.update(batch, OBJECTIVE, "token-mean", RATE)
    assert any(not torch.equal(trained[name], tensor) for name, tensor in learner.weights())
