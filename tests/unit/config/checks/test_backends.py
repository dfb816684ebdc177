"""If these fail, a plan hides what the run's start refuses of Megatron's options, or tells it by no key."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from quintet import hardware
from quintet.cli import main as command
from quintet.config.checks import megatron
from quintet.config.checks.backends import backend_problems
from quintet.config.compose import load_experiment

ROLL = Path(__file__).parents[4] / "examples/roll/qwen3-30b-a3b_moe_16gpu.yaml"

RLINF = Path(__file__).parents[4] / "examples/rlinf/math_grpo_megatron.yaml"


def told(*words: str) -> str:
    composed = load_experiment(None, ["actor.backend=megatron", "algorithm.kl=null", *words])
    return "\n".join(map(str, backend_problems(composed)))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["actor.megatron={moe_grouped_gemm: true}"], r"actor\.megatron\.moe_grouped_gemm = true .*no GPU"),
        (["actor.megatron={distributed_backend: nccl}"], "NCCL needs GPUs"),
        (["actor.megatron={ckpt_format: torch}"], "a pickle can run code"),
        (["actor.megatron={bf16: true}"], r"policy\.dtype is float32"),
        (["actor.megatron={overlap_param_gather: true}"], "only the distributed optimizer"),
    ],
)
def test_an_option_that_cant_be_honoured_is_told_by_its_key(
    monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str
) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)
    assert re.search(expected, told(*words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["actor.megatron.checkpoint=x", "reference.megatron.checkpoint=x"], None),
        (["reference.megatron.checkpoint=x"], "reference starts from its weights, or from reference.path"),
        (["actor.megatron.checkpoint=y", "reference.megatron.checkpoint=x"], "only the actor reads"),
        (
            ["actor.megatron.checkpoint=x", "reference.megatron.checkpoint=x", "reference.path=other"],
            "or from reference.path",
        ),
    ],
)
def test_megatron_weights_that_a_reference_would_not_get_are_refused(words: list[str], expected: str | None) -> None:
    found = told("algorithm.kl={}", "reference.backend=megatron", *words)
    assert expected in found if expected else not found


BUFFERS = [f"{name}.megatron.tp_comm_overlap_cfg=x" for name in ("actor", "reference")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["reference.parallel.pipeline=2", "algorithm.kl={}", "algorithm.advantage.name=gae"], None),
        (["reference.parallel.pipeline=2", "algorithm.kl={estimator: full}"], r"parallel\.pipeline = 2 .*actor has 1"),
        (["reference.parallel.expert=2", "algorithm.kl={estimator: full}"], None),
        (["reference.parallel.tensor=4", "algorithm.kl={}", "actor.megatron.tp_comm_overlap_cfg=x"], None),
        (["reference.parallel.pipeline=4", "algorithm.kl={}", *BUFFERS], None),
        (
            ["reference.parallel.tensor=4", "algorithm.kl={}", *BUFFERS],
            r"reference\.megatron\.tp_comm_overlap_cfg = .*actor has other parallel sizes",
        ),
    ],
)
def test_learners_may_have_other_sizes_unless_they_share_logits_or_buffers(
    monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str | None
) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 8)
    monkeypatch.setattr(megatron, "has_transformer_engine", lambda: True)
    common = [f"{name}.parallel.tensor=2" for name in ("actor", "reference")]
    found = told(*common, "critic.backend=megatron", "reference.backend=megatron", *words)
    assert re.search(expected, found) if expected else not found


MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_attention_heads": 2,
    "num_experts": 4,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, None),
        ({"decoder_sparse_step": 2}, "qwen3_moe with 2 dense layers among sparse ones"),
        ({"mlp_only_layers": [0]}, "qwen3_moe with 1 dense layer among sparse ones"),
        ({"model_type": "mixtral"}, "the Megatron learner does not support 'mixtral'"),
    ],
)
def test_a_model_with_other_layers_is_refused_before_it_is_loaded(
    tmp_path: Path, model: dict[str, object], expected: str | None
) -> None:
    """Else its weights are read, and end with names that are missing."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | model))
    found = told("policy.preset=null", f"policy.path={tmp_path}")
    assert re.search(rf"policy\.path = .* \(command line\): {expected}", found) if expected else not found
    own = told("critic.backend=megatron", "algorithm.advantage.name=gae", f"critic.path={tmp_path}")
    assert bool(re.search(rf"critic\.path = .* \(command line\): {expected}", own)) == (expected is not None)


def test_a_gpu_can_do_what_only_a_gpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 8)
    assert not told("actor.megatron={moe_grouped_gemm: true, distributed_backend: nccl}")


def test_a_foreign_plan_shows_what_the_start_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the foreign key and its line. What a machine with a GPU could do isn't what this version can't."""
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["quintet", "plan", str(ROLL), "--json"])
    with pytest.raises(SystemExit):
        command.main()
    found = json.loads(capsys.readouterr().out)
    listed = {one["key"]: one["source"] for one in found["not_here"]}
    assert not [one["key"] for one in found["not_yet"] if one["key"] in listed]
    (source,) = [place for key, place in listed.items() if key == "actor.megatron.moe_grouped_gemm"]
    assert re.match(r"actor_train\.strategy_args\.strategy_config\.moe_grouped_gemm: .*\.yaml:\d+", source)


def test_a_references_own_option_that_nobody_set_is_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["quintet", "plan", str(RLINF), "--json"])
    with pytest.raises(SystemExit):
        command.main()
    found = json.loads(capsys.readouterr().out)
    assert not [one["key"] for one in found["not_yet"] if ".megatron." in one["key"]]
    for option in ("distributed_backend", "apply_rope_fusion"):
        assert any(
            f"actor.megatron.{option} = " in remark and "default ignored" in remark for remark in found["remarks"]
        )
