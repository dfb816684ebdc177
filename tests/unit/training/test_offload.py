"""If these fail, what is moved away between a learner's calls stays in the way, or comes back as something else."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_grid import near_batch, objective, other_policy, ragged_batch
from torch import Tensor, nn

from quintet.algorithms.objective import CriticObjective, PolicyObjective
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.learners import CriticConfig, MemoryConfig, OptimizerConfig
from quintet.config.native.policy import LoraConfig
from quintet.policies.causal_lm import PolicyModule, ValueModel
from quintet.policies.lora import add_lora
from quintet.policies.model_loading import enable_activation_checkpointing, load_model
from quintet.training import offload as module_of_offload
from quintet.training.checkpoint import learner_state
from quintet.training.checkpoint.learner_state import restore_learner, snapshot_learner
from quintet.training.checkpoint.snapshot import HostBuffers
from quintet.training.checkpoint.state_dict import optimizer_state_dict
from quintet.training.learner import ActorLearner, CriticLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.offload import Offload, offload_activations
from quintet.training.packing import MicroBatchBudget
from quintet.training.parallel.strategy import ReplicatedStrategy
from quintet.training.reference_snapshot import ReferenceSnapshot
from quintet.training.scorer import PolicyScorer

CPU = torch.device("cpu")


class Moves:
    """Counts what is moved. Two places of host memory stand for a GPU and host memory: what moves is copied, and
    nothing else keeps what was there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        moved = module_of_offload.copy_to_device

        def counted(tensor: Tensor, device: torch.device, *, pin: bool = False) -> Tensor:
            self.count += 1
            return moved(tensor, device, pin=pin)

        monkeypatch.setattr(module_of_offload, "copy_to_device", counted)


def actor_of(directory: Path, offload: Callable[[nn.Module], Offload] | None = None) -> ActorLearner:
    model = load_model(directory)
    strategy = ReplicatedStrategy(PolicyModule(model))
    away = offload(strategy.module) if offload else None
    return ActorLearner(
        model, OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget(64), strategy=strategy, offload=away)
    )


def everything(module: nn.Module) -> Offload:
    return Offload(module, parameters=True, optimizer=True, device=CPU, offload_device=CPU)


@pytest.mark.proves(
    "verl", "actor_rollout_ref.actor.fsdp_config.param_offload", "actor_rollout_ref.actor.fsdp_config.optimizer_offload"
)
@pytest.mark.proves("rlinf", "actor.offload_optimizer", "actor.offload_weight", "actor.enable_offload")
def test_offloading_does_not_change_updates(policy_directory: Path) -> None:
    plain, moving = actor_of(policy_directory), actor_of(policy_directory, everything)
    results = []
    for actor in (plain, moving):
        batch = near_batch(actor.scorer)
        model = other_policy(actor.model)
        reference = PolicyScorer(model, LearnerSetup(budget=MicroBatchBudget(64)))
        if actor is moving:
            strategy = ReplicatedStrategy(PolicyModule(model))
            reference = PolicyScorer(
                model,
                LearnerSetup(
                    budget=MicroBatchBudget(64), strategy=strategy, offload=Offload(strategy.module, parameters=True)
                ),
            )
        steps = [
            actor.update(batch, objective(name), "token-mean", 1e-3, reference=reference)
            for name in ("ppo", "clip_cov")
        ]
        results.append(
            (
                steps,
                actor.scorer.compute_divergence(batch, reference).tolist(),
                dict(actor.weights()),
                dict(optimizer_state_dict(actor.strategy.module, actor.optimizer)),
            )
        )
    assert results[0][:2] == results[1][:2]
    for part in (2, 3):
        assert all(torch.equal(value, results[1][part][name]) for name, value in results[0][part].items())


@pytest.mark.proves("vagen", "critic.model.fsdp_config.param_offload", "critic.model.fsdp_config.optimizer_offload")
def test_critic_and_optimizer_state_are_offloaded_too(policy_directory: Path, tmp_path: Path) -> None:
    results = []
    for moving in (False, True):
        model = ValueModel(load_model(policy_directory))
        away = everything(model) if moving else None
        critic = CriticLearner(model, OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget(64), offload=away))
        for _ in range(2):
            critic.update(ragged_batch(), CriticObjective(CriticConfig()), "token-mean", 1e-3)
        again = CriticLearner(
            ValueModel(load_model(policy_directory)), OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget(64))
        )
        directory = tmp_path / str(moving)
        snapshot_learner(critic, "critic", ("model", "optimizer"), HostBuffers()).write(directory, {})
        restore_learner(again, directory, "critic", ("model", "optimizer"))
        again.update(ragged_batch(), CriticObjective(CriticConfig()), "token-mean", 1e-3)
        results.append((critic.compute_values(ragged_batch()), again.compute_values(ragged_batch())))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_restored_state_is_offloaded_again(
    policy_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State that is created next to offloaded weights would be on another device than the weights in the next step."""
    first = actor_of(policy_directory)
    first.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    snapshot_learner(first, "actor", ("model", "optimizer"), HostBuffers()).write(tmp_path, {})
    second = actor_of(policy_directory, lambda module: Offload(module, parameters=True, device=CPU, offload_device=CPU))
    there: list[int] = []
    for name in ("load_model_state_dict", "load_optimizer_state_dict"):
        load = getattr(learner_state, name)

        def seen(*value: Any, load: Callable[..., None] = load) -> None:
            there.append(second._offload._users["parameters"])
            load(*value)

        monkeypatch.setattr(learner_state, name, seen)
    restore_learner(second, tmp_path, "actor", ("model", "optimizer"))
    assert there == [1, 1]
    assert second._offload._users["parameters"] == 0
    assert all(
        torch.equal(one, other) for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True)
    )


@pytest.mark.proves("rlinf", "actor.offload_grad")
def test_device_memory_is_freed_between_calls(policy_directory: Path) -> None:
    actor = actor_of(policy_directory, everything)
    actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    assert all(parameter.grad is None for parameter in actor.model.parameters())
    storage = lambda: [  # noqa: E731
        weakref.ref(tensor.untyped_storage())
        for tensor in (
            actor.model.lm_head.weight.data,
            actor.optimizer.state[actor.model.lm_head.weight]["exp_avg"],
        )
    ]
    with actor.scorer.on_device():
        at_home = [parameter.data_ptr() for parameter in actor.model.parameters()]
        with actor.scorer.on_device():  # what is at hand stays where it is
            assert [parameter.data_ptr() for parameter in actor.model.parameters()] == at_home
        weights = storage()[0]
    assert weights() is None
    optimizer_state_dict = storage()[1]
    actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    assert optimizer_state_dict() is None


def test_optimizer_state_stays_offloaded_while_only_weights_are_needed(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = Moves(monkeypatch)
    actor = actor_of(policy_directory, lambda module: Offload(module, optimizer=True, device=CPU, offload_device=CPU))
    actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    count = moves.count
    assert count > 0
    actor.scorer.compute_log_probs(ragged_batch())
    dict(actor.weights())
    assert moves.count == count


def test_a_reference_snapshot_scores_with_offloaded_weights(policy_directory: Path) -> None:
    results = []
    for moving in (False, True):
        model = load_model(policy_directory)
        add_lora(model, LoraConfig(rank=2), seed=1)
        strategy = ReplicatedStrategy(PolicyModule(model))
        away = everything(strategy.module) if moving else None
        actor = ActorLearner(
            model, OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget(64), strategy=strategy, offload=away)
        )
        kept = ReferenceSnapshot(actor.scorer, MicroBatchBudget(64))
        for _ in range(2):
            actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-2)
        results.append(
            [
                kept.compute_log_probs(ragged_batch()),
                actor.scorer.compute_log_probs(ragged_batch()),
                *kept.state_dict().values(),
            ]
        )
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.proves("verl", "actor_rollout_ref.model.enable_activation_offload")
@pytest.mark.parametrize("recomputed", [False, True])
def test_offloaded_activations_give_the_same_gradient(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch, recomputed: bool
) -> None:
    monkeypatch.setattr(module_of_offload, "MIN_ACTIVATION_BYTES", 1024)
    results, counts = [], []
    for moving in (False, True):
        moves = Moves(monkeypatch)
        actor = actor_of(policy_directory)
        if recomputed:
            enable_activation_checkpointing(actor.model)
        if moving:
            actor.strategy.module.activation_context = lambda: offload_activations(CPU)
        actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
        results.append(dict(actor.weights()))
        counts.append(moves.count)
    assert counts[0] == 0 < counts[1]
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_saved_weights_are_not_offloaded_as_activations(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_of_offload, "MIN_ACTIVATION_BYTES", 0)
    moves = Moves(monkeypatch)
    layer, inputs = nn.Linear(64, 64, bias=False), torch.randn(8, 64, requires_grad=True)
    with offload_activations(CPU):
        out = layer(inputs)
    out.sum().backward()
    # the inputs go and come; the matrix and its transpose don't
    assert moves.count == 2


def test_offloading_on_the_cpu_logs_that_it_has_no_effect(
    policy_directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = Moves(monkeypatch)
    memory = MemoryConfig(offload_parameters=True, offload_optimizer=True, offload_gradients=True)
    with caplog.at_level(logging.INFO, module_of_offload.__name__):
        actor = actor_of(policy_directory, lambda module: Offload.from_config(memory, module, "actor"))
        actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    assert [record.getMessage() for record in caplog.records] == [
        f"actor.memory.offload_{part} has no effect: the learner computes on the CPU"
        for part in ("parameters", "optimizer", "gradients")
    ]
    assert moves.count == 0


@pytest.mark.proves("rlinf", "actor.fsdp_config.offload_pin_memory")
def test_offloaded_memory_is_pinned_if_configured(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning itself needs CUDA; what is asked of torch is held here."""
    asked: list[bool] = []
    empty_like = torch.empty_like

    def recorded(tensor: Tensor, *, device: torch.device, pin_memory: bool) -> Tensor:
        asked.append(pin_memory)
        return empty_like(tensor, device=device)

    monkeypatch.setattr(torch, "empty_like", recorded)
    for pin in (True, False):
        layer = nn.Linear(4, 4)
        with Offload(layer, parameters=True, pin=pin, device=torch.device("cpu", 0)).on_device():
            assert asked == [pin, pin, False, False]
        # away, home again (a GPU's memory isn't pinned), and away
        assert asked == [pin, pin, False, False, pin, pin]
        asked.clear()


@pytest.mark.parametrize("pin", [False, True])
def test_activations_leave_a_gpu_if_configured(monkeypatch: pytest.MonkeyPatch, *, pin: bool) -> None:
    monkeypatch.setattr(module_of_offload, "offload_activations", lambda target, pin: (target.type, pin))
    gpu = torch.device("cuda")
    config = MemoryConfig(offload_activations=True, pin=pin)
    assert module_of_offload.activation_offloading(config, gpu, "actor")() == ("cpu", pin)
    assert module_of_offload.activation_offloading(MemoryConfig(pin=pin), gpu, "actor") is nullcontext


def test_weights_and_optimizer_state_leave_a_gpu_if_configured() -> None:
    """Another kind of device stands for a GPU; what is offloaded there is shown above."""
    layer = nn.Linear(1, 1, device="meta")
    chosen: dict[str, bool] = {}

    class Chosen(Offload):
        def __init__(self, module: nn.Module, **options: bool) -> None:
            chosen.update(options)

    for parameters, optimizer in ((True, False), (False, True)):
        memory = MemoryConfig(offload_parameters=parameters, offload_optimizer=optimizer)
        Chosen.from_config(memory, layer, "actor")
        assert chosen == {"parameters": parameters, "optimizer": optimizer, "pin": False}
