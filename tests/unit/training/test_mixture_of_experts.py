"""If these fail, a mixture of experts is trained or sampled as another model than it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loss_grid import ragged_batch

from quintet.algorithms.objective import PolicyObjective
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.learners import OptimizerConfig
from quintet.config.plan.model_shapes import PRESET_SHAPES
from quintet.errors import ConfigError
from quintet.policies import tiny_models
from quintet.policies.model_loading import load_model
from quintet.records import Request
from quintet.rollout.engines.hf.engine import HfEngine
from quintet.training.learner import ActorLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.packing import MicroBatchBudget
from quintet.training.scorer import PolicyScorer


def learner(directory: Path, budget: MicroBatchBudget) -> ActorLearner:
    return ActorLearner(load_model(directory), OptimizerConfig(learning_rate=1e-3), LearnerSetup(budget=budget))


def test_packed_log_probs_agree_with_transformers(mixture_directory: Path) -> None:
    """Each token goes to its experts whatever it is packed with."""
    from transformers import AutoModelForCausalLM

    batch = ragged_batch()
    ours = PolicyScorer(load_model(mixture_directory), LearnerSetup(budget=MicroBatchBudget(70))).compute_log_probs(
        batch
    )
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


@pytest.mark.parametrize("budget", [MicroBatchBudget(1), MicroBatchBudget(40, 2)])
def test_updates_do_not_depend_on_micro_batches(mixture_directory: Path, budget: MicroBatchBudget) -> None:
    whole, cut = learner(mixture_directory, MicroBatchBudget()), learner(mixture_directory, budget)
    step_metrics = [
        [actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3) for _ in range(3)]
        for actor in (whole, cut)
    ]
    for one, other in zip(*step_metrics, strict=True):
        assert other["actor/pg_loss"] == pytest.approx(one["actor/pg_loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    experts = [name for name, _ in whole.weights() if "experts" in name or name.endswith("gate.weight")]
    before, after = dict(load_model(mixture_directory).named_parameters()), dict(whole.weights())
    assert len(experts) == 6
    assert not any(torch.equal(before[name], after[name]) for name in experts)


def test_the_engines_log_probs_agree_with_the_learners(mixture_directory: Path) -> None:
    """Of what it writes, it tells the log-probs that the learner computes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(mixture_directory, dtype=torch.float32).eval()
    engine = HfEngine(load_model(mixture_directory), max_num_seqs=3, max_model_len=64, shares_learner_model=True)
    prompts = [tuple(range(200, 212 - number)) for number in range(3)]
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(id=number, prompt=prompt, max_tokens=9, seed=number))
    written = []
    while engine.busy:
        written += engine.step()
    assert len(written) == 3
    for one in written:
        tokens = torch.tensor([*prompts[one.id], *one.tokens])
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)
        actual = logprobs[-len(one.tokens) - 1 : -1].gather(-1, torch.tensor(one.tokens)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(one.logprobs), actual, atol=2e-5, rtol=0)


def test_the_routers_auxiliary_loss_is_rejected(mixture_directory: Path) -> None:
    """It would be taken and do nothing."""
    assert load_model(mixture_directory).config.router_aux_loss_coef == 0.001  # the model's own, which says nothing
    assert load_model(mixture_directory, overrides={"router_aux_loss_coef": 0.0})
    with pytest.raises(ConfigError, match="router's auxiliary loss is not supported"):
        load_model(mixture_directory, overrides={"router_aux_loss_coef": 0.01})


def test_the_preset_has_the_planned_number_of_parameters() -> None:
    shape = tiny_models.PRESETS["grid-moe"]
    model = tiny_models.build_model(shape, shape.vocabulary, eos=2, pad=0, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == PRESET_SHAPES["grid-moe"].parameters
