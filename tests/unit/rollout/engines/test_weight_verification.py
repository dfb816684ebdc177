"""If these fail, an engine with other weights than the learner goes unnoticed."""

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
from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.model_loading import load_model
from quintet.records import Failure, FinishReason, Generation, Request
from quintet.rollout.engines.weight_verification import WeightDifference, check_weights, compare_weights

PROMPTS = [(5, 6, 7), (8, 9)]


class Copy:
    """An engine whose weights cannot be read."""

    weight_version = 0
    max_model_len = 64

    def __init__(self, model: Any, *, fails: bool = False, skew: float = 0.0) -> None:
        self.model = model
        self.fails = fails
        self.skew = skew
        self.waiting: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self) -> list[Generation]:
        request = self.waiting.pop()
        if self.fails:
            return [
                Generation(request.id, (), (), FinishReason.FAILED, 0, failure=Failure("engine", "Full", "no room"))
            ]
        tokens, logprobs = list(request.prompt), []
        for _ in range(4):
            size = len(tokens)
            layout = PackedLayout(torch.tensor([size]))
            hidden = compute_hidden_states(self.model.model, torch.tensor(tokens), torch.arange(size), layout)
            logits = self.model.lm_head(hidden[-1]).log_softmax(-1)
            tokens.append(int(logits.argmax()))
            logprobs.append(float(logits.max()) + self.skew)
        return [Generation(request.id, tuple(tokens[-4:]), tuple(logprobs), FinishReason.LENGTH, 0)]


class Open(Copy):
    """An engine whose weights can be read."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()


def pair(directory: Path) -> tuple[Any, Any]:
    return load_model(directory), load_model(directory)


@torch.no_grad()
def test_equal_weights_pass(policy_directory: Path, tmp_path: Path) -> None:
    model, other = pair(policy_directory)
    check = check_weights(Open(other), model, PROMPTS, same_dtype=True, directory=tmp_path / "checked")
    assert check.weights is not None
    assert {one.problem for one in check.weights} == {"equal"}
    assert check.logprobs < 1e-5
    assert f"{len(check.weights)} weights" in str(check)
    stored = load_file(tmp_path / "checked" / "engine.safetensors")
    assert stored.keys() == load_file(tmp_path / "checked" / "learner.safetensors").keys()
    assert stored.keys() == dict(model.named_parameters()).keys()
    assert len(json.loads((tmp_path / "checked" / "differences.json").read_text())) == len(check.weights)


@torch.no_grad()
def test_a_different_weight_is_named(policy_directory: Path, tmp_path: Path) -> None:
    model, other = pair(policy_directory)
    other.model.layers[1].mlp.up_proj.weight[0, 0] += 0.5
    message = r"differ in 1 weights \(model.layers.1.mlp.up_proj.weight: differs by 0.5\)"
    with pytest.raises(MachineError, match=message):
        check_weights(Open(other), model, PROMPTS, same_dtype=True, directory=tmp_path)


@torch.no_grad()
def test_an_engine_without_readable_weights_is_checked_by_logprobs(policy_directory: Path) -> None:
    model, other = pair(policy_directory)
    assert check_weights(Copy(other), model, PROMPTS, same_dtype=True).weights is None
    other.model.embed_tokens.weight.mul_(1.5)
    with pytest.raises(MachineError, match="log-probs of engine and learner differ by"):
        check_weights(Copy(other), model, PROMPTS, same_dtype=True)


@torch.no_grad()
@pytest.mark.parametrize(
    ("skew", "exact", "agree"), [(0.01, True, False), (0.01, False, True), (float("nan"), False, False)]
)
def test_lower_precision_may_round_but_nan_fails(policy_directory: Path, skew: float, exact: bool, agree: bool) -> None:
    model, other = pair(policy_directory)
    if agree:
        check_weights(Copy(other, skew=skew), model, PROMPTS, same_dtype=exact)
        return
    with pytest.raises(MachineError):
        check_weights(Copy(other, skew=skew), model, PROMPTS, same_dtype=exact)


@torch.no_grad()
def test_a_failing_engine_is_an_error(policy_directory: Path) -> None:
    model, other = pair(policy_directory)
    with pytest.raises(MachineError, match="did not complete a prompt \\(no room\\)"):
        check_weights(Copy(other, fails=True), model, PROMPTS, same_dtype=True)


def test_example_weights() -> None:
    ours = {"a": torch.tensor([1.0, 2.0]), "b": torch.ones(2), "c": torch.ones(3), "d": torch.tensor([1.001])}
    theirs = {"a": torch.tensor([1.0, 2.5]), "c": torch.ones(2), "d": torch.tensor([1.001]).bfloat16()}
    theirs["tied"] = torch.ones(9)
    message = list(compare_weights(ours.items(), theirs))
    assert [(one.name, one.problem, one.is_mismatch) for one in message] == [
        ("a", "differs", True),
        ("b", "missing", True),
        ("c", "shape", True),
        ("d", "rounded", False),
    ]
    assert message[0] == WeightDifference("a", "differs", 0.5)
