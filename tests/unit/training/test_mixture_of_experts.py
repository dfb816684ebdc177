"""If these fail, a mixture of experts is trained or sampled as another model than it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loss_grid import ragged_batch

from quintet.algorithms.objective import PolicyObjective
from quintet.config.native import AlgorithmConfig, OptimizerConfig
from quintet.config.plan.shapes import PRESET_SHAPES
from quintet.errors import ConfigError
from quintet.policies import tiny
from quintet.policies.causal_lm import load_model
from quintet.records import Request
from quintet.rollout.hf import HfEngine
from quintet.training.learner import ActorLearner, Scorer
from quintet.training.packing import Budget


def learner(directory: Path, budget: Budget) -> ActorLearner:
    return ActorLearner(load_model(directory), OptimizerConfig(learning_rate=1e-3), budget=budget)


def test_packed_logprobs_are_those_of_transformers(mixture_directory: Path) -> None:
    """Each token goes to its experts whatever it is packed with."""
    from transformers import AutoModelForCausalLM

    batch = ragged_batch()
    ours = Scorer(load_model(mixture_directory), budget=Budget(70)).logprobs(batch)
    model = AutoModelForCausalLM.from_pretrained(
        mixture_directory, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    start = 0
    for length in batch.lengths.tolist():
        tokens = batch.tokens[start : start + length]
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].log_softmax(-1)
        expected = torch.cat([torch.zeros(1), logits[:-1].gather(-1, tokens[1:, None]).squeeze(-1)])
        mask = batch.loss_mask[start : start + length]
        torch.testing.assert_close(ours[start : start + length], expected * mask, atol=2e-5, rtol=0)
        start += length


@pytest.mark.parametrize("budget", [Budget(1), Budget(40, 2)])
def test_what_is_learnt_doesnt_depend_on_micro_batches(mixture_directory: Path, budget: Budget) -> None:
    whole, cut = learner(mixture_directory, Budget()), learner(mixture_directory, budget)
    told = [
        [actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3) for _ in range(3)]
        for actor in (whole, cut)
    ]
    for one, other in zip(*told, strict=True):
        assert other["actor/pg_loss"] == pytest.approx(one["actor/pg_loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    experts = [name for name, _ in whole.weights() if "experts" in name or name.endswith("gate.weight")]
    before, after = dict(load_model(mixture_directory).named_parameters()), dict(whole.weights())
    assert len(experts) == 6
    assert not any(torch.equal(before[name], after[name]) for name in experts)


def test_the_engine_samples_from_the_same_policy(mixture_directory: Path) -> None:
    """Of what it writes, it tells the log-probs that the learner computes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(mixture_directory, dtype=torch.float32).eval()
    engine = HfEngine(load_model(mixture_directory), slots=3, context=64, shared=True)
    prompts = [tuple(range(200, 212 - number)) for number in range(3)]
    for number, prompt in enumerate(prompts):
        engine.submit(Request(id=number, prompt=prompt, max_tokens=9, seed=number))
    written = []
    while engine.busy:
        written += engine.step()
    assert len(written) == 3
    for one in written:
        tokens = torch.tensor([*prompts[one.id], *one.tokens])
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)
        said = logprobs[-len(one.tokens) - 1 : -1].gather(-1, torch.tensor(one.tokens)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(one.logprobs), said, atol=2e-5, rtol=0)


def test_the_routers_auxiliary_loss_is_refused(mixture_directory: Path) -> None:
    """It would be taken and do nothing."""
    assert load_model(mixture_directory).config.router_aux_loss_coef == 0.001  # the model's own, which says nothing
    assert load_model(mixture_directory, overrides={"router_aux_loss_coef": 0.0})
    with pytest.raises(ConfigError, match="no auxiliary loss of the router"):
        load_model(mixture_directory, overrides={"router_aux_loss_coef": 0.01})


def test_the_preset_is_as_large_as_the_plan_says() -> None:
    shape = tiny.PRESETS["grid-moe"]
    model = tiny.make_model(shape, shape.vocabulary, eos=2, pad=0, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == PRESET_SHAPES["grid-moe"].parameters
