"""If these fail, what is moved away between a learner's calls stays in the way, or comes back as something else."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_grid import near_batch, objective, other_policy, ragged_batch
from torch import Tensor, nn

from quintet.algorithms.objective import CriticObjective, PolicyObjective
from quintet.config.native import AlgorithmConfig, CriticConfig, OptimizerConfig
from quintet.config.native.learners import MemoryConfig
from quintet.config.native.policy import LoraConfig
from quintet.policies.adapters import add_lora
from quintet.policies.causal_lm import PolicyModule, ValueModel, load_model, recompute_activations
from quintet.training import learner_files
from quintet.training import offload as module_of_offload
from quintet.training.kept import KeptPolicy
from quintet.training.lay import Whole
from quintet.training.learner import ActorLearner, CriticLearner, Scorer
from quintet.training.learner_files import copy_learner, restore_learner
from quintet.training.offload import Offload, activations_away
from quintet.training.packing import Budget
from quintet.training.sharded_state import moments
from quintet.training.snapshot import HostMemory

CPU = torch.device("cpu")


class Moves:
    """Counts what is moved. Two places of main memory stand for a GPU and main memory: what moves is copied, and
    nothing else keeps what was there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        moved = module_of_offload.moved

        def counted(tensor: Tensor, device: torch.device, *, pin: bool = False) -> Tensor:
            self.count += 1
            return moved(tensor, device, pin=pin)

        monkeypatch.setattr(module_of_offload, "moved", counted)


def actor_of(directory: Path, offload: Callable[[nn.Module], Offload] | None = None) -> ActorLearner:
    model = load_model(directory)
    lay = Whole(PolicyModule(model))
    away = offload(lay.module) if offload else None
    return ActorLearner(model, OptimizerConfig(), budget=Budget(64), lay=lay, offload=away)


def everything(module: nn.Module) -> Offload:
    return Offload(module, parameters=True, optimizer=True, home=CPU, away=CPU)


def test_moving_changes_nothing_that_is_learnt(policy_directory: Path) -> None:
    plain, moving = actor_of(policy_directory), actor_of(policy_directory, everything)
    told = []
    for actor in (plain, moving):
        batch = near_batch(actor.scorer)
        model = other_policy(actor.model)
        reference = Scorer(model, budget=Budget(64))
        if actor is moving:
            lay = Whole(PolicyModule(model))
            reference = Scorer(model, budget=Budget(64), lay=lay, offload=Offload(lay.module, parameters=True))
        steps = [
            actor.update(batch, objective(name), "token-mean", 1e-3, reference=reference)
            for name in ("ppo", "clip_cov")
        ]
        told.append(
            (
                steps,
                actor.scorer.divergence(batch, reference).tolist(),
                dict(actor.weights()),
                dict(moments(actor.lay.module, actor.optimizer)),
            )
        )
    assert told[0][:2] == told[1][:2]
    for part in (2, 3):
        assert all(torch.equal(value, told[1][part][name]) for name, value in told[0][part].items())


def test_a_critic_and_its_moments_move_too(policy_directory: Path, tmp_path: Path) -> None:
    told = []
    for moving in (False, True):
        model = ValueModel(load_model(policy_directory))
        away = everything(model) if moving else None
        critic = CriticLearner(model, OptimizerConfig(), budget=Budget(64), offload=away)
        for _ in range(2):
            critic.update(ragged_batch(), CriticObjective(CriticConfig()), "token-mean", 1e-3)
        again = CriticLearner(ValueModel(load_model(policy_directory)), OptimizerConfig(), budget=Budget(64))
        place = tmp_path / str(moving)
        copy_learner(critic, "critic", ("model", "optimizer"), HostMemory()).write(place, {})
        restore_learner(again, place, "critic", ("model", "optimizer"))
        again.update(ragged_batch(), CriticObjective(CriticConfig()), "token-mean", 1e-3)
        told.append((critic.values(ragged_batch()), again.values(ragged_batch())))
    assert all(torch.equal(one, other) for one, other in zip(*told, strict=True))


def test_what_is_read_back_belongs_where_weights_compute(
    policy_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments that nobody moves, made beside weights that are away, would be on another device than those at the next
    step."""
    first = actor_of(policy_directory)
    first.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    copy_learner(first, "actor", ("model", "optimizer"), HostMemory()).write(tmp_path, {})
    second = actor_of(policy_directory, lambda module: Offload(module, parameters=True, home=CPU, away=CPU))
    there: list[int] = []
    for name in ("load_weights", "load_moments"):
        load = getattr(learner_files, name)

        def seen(*given: Any, load: Callable[..., None] = load) -> None:
            there.append(second._offload._needed["parameters"])
            load(*given)

        monkeypatch.setattr(learner_files, name, seen)
    restore_learner(second, tmp_path, "actor", ("model", "optimizer"))
    assert there == [1, 1]
    assert second._offload._needed["parameters"] == 0
    assert all(
        torch.equal(one, other) for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True)
    )


def test_memory_is_given_back_between_calls(policy_directory: Path) -> None:
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
    with actor.scorer.at_hand():
        at_home = [parameter.data_ptr() for parameter in actor.model.parameters()]
        with actor.scorer.at_hand():  # what is at hand stays where it is
            assert [parameter.data_ptr() for parameter in actor.model.parameters()] == at_home
        weights = storage()[0]
    assert weights() is None
    moments = storage()[1]
    actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    assert moments() is None


def test_moments_stay_away_while_only_weights_are_needed(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = Moves(monkeypatch)
    actor = actor_of(policy_directory, lambda module: Offload(module, optimizer=True, home=CPU, away=CPU))
    actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    count = moves.count
    assert count > 0
    actor.scorer.logprobs(ragged_batch())
    dict(actor.weights())
    assert moves.count == count


def test_a_kept_policy_judges_wherever_its_weights_are(policy_directory: Path) -> None:
    told = []
    for moving in (False, True):
        model = load_model(policy_directory)
        add_lora(model, LoraConfig(rank=2), seed=1)
        lay = Whole(PolicyModule(model))
        away = everything(lay.module) if moving else None
        actor = ActorLearner(model, OptimizerConfig(), budget=Budget(64), lay=lay, offload=away)
        kept = KeptPolicy(actor.scorer, Budget(64))
        for _ in range(2):
            actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-2)
        told.append([kept.logprobs(ragged_batch()), actor.scorer.logprobs(ragged_batch()), *kept.state().values()])
    assert all(torch.equal(one, other) for one, other in zip(*told, strict=True))


@pytest.mark.parametrize("recomputed", [False, True])
def test_activations_that_were_moved_give_the_same_gradient(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch, recomputed: bool
) -> None:
    monkeypatch.setattr(module_of_offload, "SMALL_BYTES", 1024)
    told, counts = [], []
    for moving in (False, True):
        moves = Moves(monkeypatch)
        actor = actor_of(policy_directory)
        if recomputed:
            recompute_activations(actor.model)
        if moving:
            actor.lay.module.keeping = lambda: activations_away(CPU)
        actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
        told.append(dict(actor.weights()))
        counts.append(moves.count)
    assert counts[0] == 0 < counts[1]
    assert all(torch.equal(value, told[1][name]) for name, value in told[0].items())


def test_weights_that_a_pass_saves_arent_moved(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_offload, "SMALL_BYTES", 0)
    moves = Moves(monkeypatch)
    layer, inputs = nn.Linear(64, 64, bias=False), torch.randn(8, 64, requires_grad=True)
    with activations_away(CPU):
        out = layer(inputs)
    out.sum().backward()
    # the inputs go and come; the matrix and its transpose don't
    assert moves.count == 2


def test_on_a_cpu_it_is_said_that_there_is_nothing_to_move(
    policy_directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = Moves(monkeypatch)
    memory = MemoryConfig(offload_parameters=True, offload_optimizer=True, offload_gradients=True)
    with caplog.at_level(logging.INFO, module_of_offload.__name__):
        actor = actor_of(policy_directory, lambda module: Offload.of(memory, module, "actor"))
        actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    assert [record.getMessage() for record in caplog.records] == [
        f"actor.memory.offload_{part}: they are in main memory already"
        for part in ("parameters", "optimizer", "gradients")
    ]
    assert moves.count == 0


def test_memory_is_pinned_where_that_is_asked_for(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning itself needs CUDA; what is asked of torch is held here."""
    asked: list[bool] = []
    empty_like = torch.empty_like

    def recorded(tensor: Tensor, *, device: torch.device, pin_memory: bool) -> Tensor:
        asked.append(pin_memory)
        return empty_like(tensor, device=device)

    monkeypatch.setattr(torch, "empty_like", recorded)
    for pin in (True, False):
        layer = nn.Linear(4, 4)
        with Offload(layer, parameters=True, pin=pin, home=torch.device("cpu", 0)).at_hand():
            assert asked == [pin, pin, False, False]
        # away, home again (a GPU's memory isn't pinned), and away
        assert asked == [pin, pin, False, False, pin, pin]
        asked.clear()
