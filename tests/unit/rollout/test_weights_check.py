"""If these fail, an engine that plays another policy than the one that learns goes unnoticed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quintet.errors import MachineError
from quintet.policies.attention import PackedLayout
from quintet.policies.causal_lm import hidden_states, load_model
from quintet.records import Failure, Generation, Request, StopReason
from quintet.rollout.weights_check import Difference, check_weights, compare_weights

PROMPTS = [(5, 6, 7), (8, 9)]


class Copy:
    """An engine with weights of its own that can't be asked for."""

    weight_version = 0
    context = 64

    def __init__(self, model: Any, *, fails: bool = False, skew: float = 0.0) -> None:
        self.model = model
        self.fails = fails
        self.skew = skew
        self.waiting: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self) -> list[Generation]:
        request = self.waiting.pop()
        if self.fails:
            return [Generation(request.id, (), (), StopReason.FAILED, 0, failure=Failure("engine", "Full", "no room"))]
        tokens, logprobs = list(request.prompt), []
        for _ in range(4):
            size = len(tokens)
            layout = PackedLayout(torch.tensor([size]))
            hidden = hidden_states(self.model.model, torch.tensor(tokens), torch.arange(size), layout)
            logits = self.model.lm_head(hidden[-1]).log_softmax(-1)
            tokens.append(int(logits.argmax()))
            logprobs.append(float(logits.max()) + self.skew)
        return [Generation(request.id, tuple(tokens[-4:]), tuple(logprobs), StopReason.LENGTH, 0)]


class Open(Copy):
    """One that can."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()


def pair(directory: Path) -> tuple[Any, Any]:
    return load_model(directory), load_model(directory)


@torch.no_grad()
def test_the_same_weights_agree(policy_directory: Path, tmp_path: Path) -> None:
    model, other = pair(policy_directory)
    check = check_weights(Open(other), model, PROMPTS, exact=True, directory=tmp_path / "checked")
    assert check.weights is not None
    assert {one.problem for one in check.weights} == {"equal"}
    assert check.logprobs < 1e-5
    assert f"{len(check.weights)} weights" in str(check)
    stored = load_file(tmp_path / "checked" / "engine.safetensors")
    assert stored.keys() == load_file(tmp_path / "checked" / "learner.safetensors").keys()
    assert stored.keys() == dict(model.named_parameters()).keys()
    assert len(json.loads((tmp_path / "checked" / "differences.json").read_text())) == len(check.weights)


@torch.no_grad()
def test_a_weight_that_differs_is_named(policy_directory: Path, tmp_path: Path) -> None:
    model, other = pair(policy_directory)
    other.model.layers[1].mlp.up_proj.weight[0, 0] += 0.5
    told = r"differ in 1 weights \(model.layers.1.mlp.up_proj.weight: differs by 0.5\)"
    with pytest.raises(MachineError, match=told):
        check_weights(Open(other), model, PROMPTS, exact=True, directory=tmp_path)


@torch.no_grad()
def test_an_engine_that_cant_be_asked_is_known_by_its_words(policy_directory: Path) -> None:
    model, other = pair(policy_directory)
    assert check_weights(Copy(other), model, PROMPTS, exact=True).weights is None
    other.model.embed_tokens.weight.mul_(1.5)
    with pytest.raises(MachineError, match="log-probs of engine and learner differ by"):
        check_weights(Copy(other), model, PROMPTS, exact=True)


@torch.no_grad()
@pytest.mark.parametrize(
    ("skew", "exact", "agree"), [(0.01, True, False), (0.01, False, True), (float("nan"), False, False)]
)
def test_a_smaller_type_may_round_and_nothing_may_be_nan(
    policy_directory: Path, skew: float, exact: bool, agree: bool
) -> None:
    model, other = pair(policy_directory)
    if agree:
        check_weights(Copy(other, skew=skew), model, PROMPTS, exact=exact)
        return
    with pytest.raises(MachineError):
        check_weights(Copy(other, skew=skew), model, PROMPTS, exact=exact)


@torch.no_grad()
def test_an_engine_that_fails_says_why(policy_directory: Path) -> None:
    model, other = pair(policy_directory)
    with pytest.raises(MachineError, match="couldn't answer a prompt \\(no room\\)"):
        check_weights(Copy(other, fails=True), model, PROMPTS, exact=True)


def test_weights_by_hand() -> None:
    ours = {"a": torch.tensor([1.0, 2.0]), "b": torch.ones(2), "c": torch.ones(3), "d": torch.tensor([1.001])}
    theirs = {"a": torch.tensor([1.0, 2.5]), "c": torch.ones(2), "d": torch.tensor([1.001]).bfloat16()}
    theirs["tied"] = torch.ones(9)
    found = list(compare_weights(ours.items(), theirs))
    assert [(one.name, one.problem, one.wrong) for one in found] == [
        ("a", "differs", True),
        ("b", "missing", True),
        ("c", "shape", True),
        ("d", "rounded", False),
    ]
    assert found[0] == Difference("a", "differs", 0.5)
