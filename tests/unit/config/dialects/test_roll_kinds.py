"""If these fail, a file of one of ROLL's pipelines is read as a run of another kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foreign import converted, natively

from quintet.cli import plan
from quintet.config.capabilities import Capability
from quintet.config.dialects.composition.foreign_config import config_from_tree
from quintet.config.dialects.loader import UnknownKeyPolicy, load_config
from quintet.config.dialects.registry import DIALECTS, detect
from quintet.config.dialects.roll.kinds import Kind, kind_of
from quintet.config.native.training import DistillationConfig
from quintet.errors import ConfigError, UnsupportedRunError

WORKER: dict[str, Any] = {
    "model_args": {"dtype": "bf16"},
    "training_args": {"learning_rate": 1.0e-5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "data_args": {"template": "qwen2_5", "file_name": "train.json"},
    "strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": {"fsdp_size": 4}},
    "device_mapping": "list(range(0,4))",
}
SFT: dict[str, Any] = {
    "exp_name": "tuned",
    "pretrain": "some/model",
    "sequence_length": 2048,
    "save_steps": 7,
    "eval_steps": 3,
    "prompt_key": "question",
    "response_key": "reply",
    "max_grad_norm": 0.5,
    "sft_train": WORKER,
    "validation": {"data_args": {"file_name": "held_out.json"}},
}
DPO = {"pretrain": "some/model", "beta": 0.1, "chosen_key": "chosen", "actor_train": WORKER, "reference": WORKER}
DISTILLATION = {"student_pretrain": "small", "teacher_pretrain": "large", "student": WORKER, "teacher": WORKER}
ON_POLICY = {
    "pretrain": "some/model",
    "is_pure_opd": True,
    "student_train": WORKER,
    "student_infer": {"device_mapping": "[0]"},
    "teacher": {"large": WORKER},
}
FILES: list[tuple[dict[str, Any], Kind]] = [
    (SFT, Kind.SFT),
    (DPO, Kind.DPO),
    (DISTILLATION, Kind.DISTILLATION),
    (ON_POLICY, Kind.ON_POLICY_DISTILLATION),
    ({"train_env_manager": {}, "actor_train": {}}, Kind.AGENTIC),
    ({"rewards": {"math_rule": {}}, "actor_train": {}}, Kind.RLVR),
    ({"custom_env": {"Lake": {"env_type": "frozen_lake"}}}, Kind.ENVIRONMENTS),
    ({"deepspeed_zero3": {"zero_optimization": {"stage": 3}}}, Kind.ENVIRONMENTS),
    (
        {"actor_train": {"model_args": {"model_config_kwargs": {"trainable_models": "dit2"}}}, "train_batch_size": 8},
        Kind.REWARD_FLOW,
    ),
]


@pytest.mark.parametrize(("tree", "kind"), FILES, ids=[kind.name for _, kind in FILES])
def test_the_sections_of_a_file_decide_its_kind(tree: dict[str, Any], kind: Kind) -> None:
    assert detect(tree)[0] == "roll"
    assert kind_of(tree) is kind


@pytest.mark.parametrize(
    ("tree", "capability"),
    [
        (DPO, Capability.PREFERENCES),
        (ON_POLICY, Capability.ON_POLICY_DISTILLATION),
    ],
)
def test_a_kind_that_does_not_exist_here_is_no_other_one(tree: dict[str, Any], capability: Capability) -> None:
    policies: tuple[UnknownKeyPolicy, ...] = ("refuse", "warn")
    for unknown in policies:
        with pytest.raises(UnsupportedRunError, match="requires") as error:
            load_config(config_from_tree(tree, "given.yaml:1"), DIALECTS["roll"], unknown=unknown)
        assert str(capability) in str(error.value)


def test_a_plan_names_what_such_a_run_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dpo.yaml"
    path.write_text(json.dumps(DPO))
    plan.run(str(path), [], None, "refuse", as_json=True)
    (waits,) = json.loads(capsys.readouterr().out)["not_yet"]
    assert str(Capability.PREFERENCES) in waits["message"]


def test_definitions_of_environments_are_no_run() -> None:
    with pytest.raises(ConfigError, match="has no settings of a run"):
        load_config(config_from_tree({"custom_env": {"Lake": {"env_type": "x"}}}, "envs.yaml:1"), DIALECTS["roll"])


SFT_KEYS = (
    *("prompt_key", "response_key", "global_template", "pretrain", "exp_name", "seed", "max_steps", "save_steps"),
    *("eval_steps", "rollout_batch_size", "prompt_length", "response_length", "max_grad_norm"),
)


@pytest.mark.proves("roll", *SFT_KEYS)
def test_fine_tuning_is_fine_tuning(tmp_path: Path) -> None:
    """An optimizer step has 2 × 4 × 4 devices = 32 rows."""
    found = converted(tmp_path, "roll", {**SFT, "seed": 7, "global_template": "qwen3"})
    run = found.composed.experiment
    assert run.sft is not None
    assert run.data is not None
    assert (run.sft.batch, run.sft.devices, run.sft.sequences_per_pass, run.sft.max_tokens) == (32, 4, 2, 2048)
    assert (run.data.prompt_key, run.data.response_key, run.data.template) == ("question", "reply", "qwen3")
    assert (run.data.train_files, run.data.validation_files) == (("train.json",), ("held_out.json",))
    assert (run.name, run.seed, run.policy.path, run.policy.dtype) == ("tuned", 7, "some/model", "bfloat16")
    assert (run.checkpoint.every_steps, run.validation.every_steps, run.sft.optimizer.max_grad_norm) == (7, 3, 0.5)
    assert (run.sft.optimizer.learning_rate, run.sft.optimizer.schedule) == (1.0e-5, "linear")
    ignored = {"max_steps": 3, "rollout_batch_size": 7, "prompt_length": 10, "response_length": 10}
    assert (
        converted(tmp_path, "roll", {**SFT, **ignored}).composed.experiment
        == converted(tmp_path, "roll", SFT).composed.experiment
    )


DISTILLED: dict[str, Any] = {
    "exp_name": "distilled",
    "student_pretrain": "some/student",
    "teacher_pretrain": "some/teacher",
    "sequence_length": 2048,
    "question_key": "question_zh",
    "answer_key": "answer_zh",
    "student": WORKER,
    "teacher": {"model_args": {"dtype": "bf16"}, "training_args": {"per_device_train_batch_size": 8}},
    "validation": {"data_args": {"file_name": "held_out.json"}},
}
DISTILLATION_KEYS = (
    *("student_pretrain", "teacher_pretrain", "question_key", "answer_key", "logits_topk", "distill_loss_weight"),
    *("kd_temperature", "teacher_temperature", "kd_objective", "adaptive_kl_alpha", "skew_lambda"),
    *("distill_on_prompt", "logits_transfer_backend"),
)


@pytest.mark.proves("roll", *DISTILLATION_KEYS)
def test_distillation_is_fine_tuning_with_a_teacher(tmp_path: Path) -> None:
    """An optimizer step has 2 × 4 × 4 devices = 32 rows, as in ROLL's data loader."""
    found = converted(tmp_path, "roll", DISTILLED)
    run = found.composed.experiment
    assert [problem.key for problem in found.unsupported] == ["student.device_mapping"], "only processes are missing"
    assert run.sft is not None
    assert run.data is not None
    assert (run.sft.batch, run.sft.devices, run.sft.sequences_per_pass, run.sft.max_tokens) == (32, 4, 2, 2048)
    assert (run.data.prompt_key, run.data.response_key, run.data.template) == ("question_zh", "answer_zh", "qwen2_5")
    assert (run.policy.path, run.reference.path, run.reference.dtype) == ("some/student", "some/teacher", "bfloat16")
    assert run.reference.inference_budget.sequences == 8
    assert (run.sft.distillation, run.sft.train_on_prompt) == (DistillationConfig(), False)
    assert run.sft.optimizer.max_grad_norm == 1.0e9, "ROLL does not clip by default"
    options = {
        "logits_topk": 0, "distill_loss_weight": 1, "kd_temperature": 2, "teacher_temperature": 1.5,
        "kd_objective": "skewed_reverse_kl", "adaptive_kl_alpha": 0.25, "skew_lambda": 0.2, "max_grad_norm": 0.5,
        "distill_on_prompt": True, "logits_transfer_backend": "ray", "global_template": "qwen3",
    }  # fmt: skip
    run = converted(tmp_path, "roll", {**DISTILLED, **options}).composed.experiment
    assert run.sft is not None
    assert run.sft.distillation == DistillationConfig(
        weight=1.0, objective="skewed_reverse_kl", top_k=0, temperature=2.0, teacher_temperature=1.5, alpha=0.25,
        skew=0.2,
    )  # fmt: skip
    assert (run.sft.train_on_prompt, run.sft.optimizer.max_grad_norm) == (True, 0.5)
    assert run.data is not None
    assert run.data.template == "qwen3"


def test_models_of_the_workers_count_if_both_have_one(tmp_path: Path) -> None:
    """As in ROLL, where the path of one alone is replaced by `student_pretrain` and `teacher_pretrain`."""
    student = {"student": {**WORKER, "model_args": {"model_name_or_path": "other/student"}}}
    teacher = {"teacher": {"model_args": {"model_name_or_path": "other/teacher"}}}
    run = converted(tmp_path, "roll", {**DISTILLED, **student}).composed.experiment
    assert (run.policy.path, run.reference.path) == ("some/student", "some/teacher")
    run = converted(tmp_path, "roll", {**DISTILLED, **student, **teacher}).composed.experiment
    assert (run.policy.path, run.reference.path) == ("other/student", "other/teacher")


def test_distillation_with_images_is_none_without(tmp_path: Path) -> None:
    """ROLL has another pipeline for it, chosen by the start script; its template is the only sign in the file."""
    vision = {**WORKER, "data_args": {"template": "qwen2-vl", "file_name": "geometry"}}
    found = converted(tmp_path, "roll", {**DISTILLED, "student": vision})
    assert any(str(Capability.MEDIA) in problem.message for problem in found.unsupported)


def test_a_teacher_on_other_devices_waits(tmp_path: Path) -> None:
    found = converted(tmp_path, "roll", {**DISTILLED, "teacher": {"device_mapping": "list(range(4,8))"}})
    assert any("teacher.device_mapping" in problem.message for problem in found.unsupported)


def test_a_teacher_split_by_megatron_waits(tmp_path: Path) -> None:
    split = {"strategy_name": "megatron_infer", "strategy_config": {"tensor_model_parallel_size": 2}}
    found = converted(tmp_path, "roll", {**DISTILLED, "teacher": {"strategy_args": split}})
    assert any(str(Capability.ROLL_LEARNERS) in problem.message for problem in found.unsupported)


@pytest.mark.parametrize("key", ["query_key", "system_key"])
def test_prompts_of_several_columns_wait(tmp_path: Path, key: str) -> None:
    messages = [problem.message for problem in converted(tmp_path, "roll", {**SFT, key: "input"}).unsupported]
    assert any(f"{key} = 'input'" in message and str(Capability.COLUMN_PROMPTS) in message for message in messages)


def test_a_mapping_may_list_its_devices(tmp_path: Path) -> None:
    tree = {"actor_train": {"device_mapping": "list([0,1,2,3,8,9,10,11])", "data_args": {"file_name": "a.json"}}}
    assert natively(converted(tmp_path, "roll", tree), "placement.actor.devices") == (0, 1, 2, 3, 8, 9, 10, 11)
