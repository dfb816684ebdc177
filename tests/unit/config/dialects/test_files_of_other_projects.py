"""If these fail, a file that its framework runs is refused here, or a message says what is not true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively

from quintet.cli.configuration import InspectedConfig, inspect_config
from quintet.config.checks.processes import planned_rank
from quintet.config.dialects.composition.foreign_config import config_from_tree
from quintet.config.dialects.loader import convert, merge_with_reference
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.vagen.key_values import loop_by_turns
from quintet.config.key_states import State, key_states
from quintet.config.plan.run_plan import describe_run, plan_run
from quintet.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PPO: dict[str, Any] = {
    "actor_rollout_ref": {
        "model": {"path": "models/small"},
        "actor": {"ppo_micro_batch_size_per_gpu": 1},
        "rollout": {"name": "hf"},
    },
    "data": {"train_files": "a.parquet", "val_files": "b.parquet"},
    "trainer": {"n_gpus_per_node": 1, "nnodes": 1},
}
WORDS = (
    f"data.train_files=a.parquet actor_rollout_ref.model.path=models/small {ROLLOUT}.name=hf"
    f" {ACTOR}.ppo_micro_batch_size_per_gpu=1 trainer.n_gpus_per_node=1"
)


def refusal(path: Path, text: str, *overrides: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        inspect_config(str(path), list(overrides), None, "refuse")
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "native", "expected"),
    [
        ("trainer.max_actor_ckpt_to_keep", 0, "checkpoint.keep", 1_000_000),
        ("trainer.max_actor_ckpt_to_keep", 3, "checkpoint.keep", 3),
        ("trainer.resume_from_path", False, "resume", "auto"),
        ("trainer.resume_from_path", True, "resume", "auto"),
        ("algorithm.kl_ctrl.target_kl", 0.0, "algorithm.kl", None),
    ],
)
def test_a_value_that_verl_takes_is_taken(tmp_path: Path, key: str, value: object, native: str, expected: Any) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {key: value}))
    assert (natively(found, native), found.unsupported) == (expected, ())


def test_a_run_that_resumes_from_no_checkpoint_is_refused(tmp_path: Path) -> None:
    mode = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": True}
    with pytest.raises(ConfigError, match=r"needs trainer\.resume_from_path"):
        converted(tmp_path, "verl", changed(PPO, mode))


def test_a_target_that_counts_is_checked(tmp_path: Path) -> None:
    control = {"algorithm.kl_ctrl.target_kl": 0.0, "algorithm.kl_ctrl.type": "adaptive"}
    with pytest.raises(ConfigError, match="must be a number > 0"):
        converted(tmp_path, "verl", changed(PPO, {**control, "algorithm.use_kl_in_reward": True}))


def test_of_two_names_of_one_key_that_counts_which_the_framework_reads(tmp_path: Path) -> None:
    data = {"train_files": "a.parquet", "micro_batch_size": 16, "micro_batch_size_per_gpu": 2}
    tuned = converted(tmp_path, "verl", {"model": {"partial_pretrain": "models/small"}, "data": data})
    assert natively(tuned, "sft.sequences_per_pass") == 2
    assert any("data.micro_batch_size (" in remark and "has no effect" in remark for remark in tuned.composed.remarks)


OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"


def overlong_run(tmp_path: Path, module: str) -> InspectedConfig:
    """A script of a trainer that adds a penalty by the key of the reward manager."""
    path = tmp_path / "run.sh"
    penalty = f"reward_model.reward_manager=dapo +{OVERLONG}.enable=True +{OVERLONG}.len=16"
    path.write_text(f"python3 -m {module} {WORDS} {penalty} trainer.nnodes=1 reward_model.enable=False\n")
    return inspect_config(str(path), [], None, "refuse")


@pytest.mark.parametrize("module", ["recipe.dapo.main_dapo", "recipe.dapo.src.main_dapo"])
def test_a_penalty_is_planned_that_dapos_recipe_does_not_read(tmp_path: Path, module: str) -> None:
    """`main_dapo` of 0.4 to 0.7 hands `reward_model.overlong_buffer` of its file to the reward manager.

    In April 2025 it was in `recipe/dapo/src`.
    """
    recipe = overlong_run(tmp_path, module)
    reward = recipe.composed.experiment.reward
    assert reward is None or reward.overlong is None
    states = {each.setting.name: each for each in key_states(recipe.runnable, recipe.unsupported)}
    assert states[f"{OVERLONG}.enable"].state is State.NO_EFFECT
    other = overlong_run(tmp_path, "verl.trainer.main_ppo").composed.experiment.reward
    assert other is not None
    assert other.overlong is not None
    assert other.overlong.buffer == 16


@pytest.mark.parametrize("enabled", [True, False])
def test_a_penalty_of_a_file_gives_way_to_a_key_that_the_recipe_does_not_read(tmp_path: Path, enabled: bool) -> None:
    of_file = {"reward_model.overlong_buffer": {"enable": enabled, "len": 16}, "reward_model.reward_manager": "dapo"}
    found = converted(
        tmp_path, "verl", changed(PPO, {**of_file, f"{OVERLONG}.enable": not enabled, f"{OVERLONG}.len": 32})
    )
    reward = found.composed.experiment.reward
    overlong = None if reward is None else reward.overlong
    assert (None if overlong is None else overlong.buffer) == (16 if enabled else None)
    assert any(f"{OVERLONG}.enable (" in remark and "has no effect" in remark for remark in found.composed.remarks)


def test_rlinf_reads_the_total_of_the_environments() -> None:
    envs = {name: {"env_type": "libero", "num_envs": 4, "total_num_envs": 8} for name in ("train", "eval")}
    tree = {"runner": {"task_type": "embodied"}, "env": envs}
    values, remarks = merge_with_reference(config_from_tree(tree, "run.yaml:1"), DIALECTS["rlinf"])
    assert [values[f"env.{name}.total_num_envs"] for name in envs] == [8, 8]
    assert sum("num_envs (run.yaml:1) has no effect" in remark for remark in remarks) == 2


@pytest.mark.parametrize("reference", ["${train_env_manager.tags}", ["Lake"]])
def test_an_environment_of_roll_that_no_tag_uses_may_have_any_keys(reference: object) -> None:
    """ROLL reads the tags only, also if those of validation are written as the ones of training."""
    manager = {"tags": ["Lake"], "num_groups_partition": [8], "num_env_groups": 8, "group_size": 4}
    tree = {
        "actor_train": {"model_args": {}},
        "actor_infer": {"generating_args": {}},
        "pretrain": "models/small",
        "sequence_length": 4096,
        "train_env_manager": manager,
        "val_env_manager": manager | {"tags": reference},
        "custom_envs": {
            "Lake": {"env_type": "frozen_lake", "max_steps": 5, "max_tokens_per_step": 64, "env_config": {}},
            "Shop": {"env_type": "shop", "warehouse": {"shelves": 3}},
        },
    }
    result = convert(config_from_tree(tree, "run.yaml:1"), DIALECTS["roll"], to_plan=True)
    assert not [problem for problem in result.unsupported if "Shop" in problem.message]


@pytest.mark.parametrize(
    ("name", "target", "by_turns"),
    [
        ("mine.yaml", "vagen.agent_loop.gym_agent_loop_no_concat.GymAgentLoop", True),
        ("agent_no_concat.yaml", "vagen.agent_loop.gym_agent_loop.GymAgentLoop", False),
        ("agent.yaml", "my_lab.loops.Loop", None),
    ],
)
def test_the_class_in_a_file_of_agent_loops_decides_and_not_its_name(
    tmp_path: Path, name: str, target: str, by_turns: bool | None
) -> None:
    (tmp_path / name).write_text(f"- name: gym_agent\n  # vagen.agent_loop.x\n  _target_: {target}\n")
    assert loop_by_turns(str(tmp_path / name)) is by_turns


def test_without_its_file_the_name_of_an_agent_loop_decides() -> None:
    names = ("nowhere/agent.yaml", "nowhere/agent_no_concat.yaml", "nowhere/mine.yaml")
    assert [loop_by_turns(name) for name in names] == [False, True, None]


def test_directories_of_a_roll_run_may_have_a_host_and_a_time(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "actor_train: {model_args: {}}\nactor_infer: {generating_args: {}}\npretrain: models/small\n"
        "rewards: {math_rule: {tag_included: [a]}}\n"
    )
    path = tmp_path / "run.sh"
    words = "output_dir=out/$(hostname -s) logging_dir=logs-$(date +%s) checkpoint_config.output_dir=c/$(date +%s)"
    path.write_text(f"python start_rlvr_pipeline.py --config-path . --config-name config {words}\n")
    remarks = inspect_config(str(path), [], None, "warn").composed.remarks
    assert not [remark for remark in remarks if "output_dir" in remark and "unknown" in remark]


def test_a_switch_that_a_shell_leaves_empty_is_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOOLS", raising=False)
    path = tmp_path / "run.sh"
    path.write_text(f"python3 -m verl.trainer.main_ppo {WORDS} {ROLLOUT}.multi_turn.enable=$TOOLS\n")
    inspected = inspect_config(str(path), [], None, "refuse")
    assert inspected.composed.experiment.rollout.tool_calls is None
    assert f"{ROLLOUT}.multi_turn.enable is empty for a shell, and false" in capsys.readouterr().err


def test_a_variable_that_is_not_set_is_named_with_how_to_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATA_DIR", raising=False)
    path = tmp_path / "run.sh"
    message = refusal(path, f"python3 -m verl.trainer.main_ppo {WORDS} data.val_files=$DATA_DIR/b\n")
    assert f"data.val_files ({path}:1): $DATA_DIR is set neither in the script nor in the environment" in message
    assert "set it on the command line: data.val_files=…" in message
    assert f"or in the environment: DATA_DIR=… quintet plan {path}" in message


@pytest.mark.parametrize(
    ("before", "condition"),
    [
        ('if [ -z "$MODEL_PATH" ]; then\n  echo missing\n  exit 1\nfi', '[ -z "$MODEL_PATH" ]'),
        ('[ -n "$MODEL_PATH" ] || exit 1', '[ -n "$MODEL_PATH" ]'),
    ],
)
def test_a_script_that_ends_before_it_trains_says_under_which_condition(
    tmp_path: Path, before: str, condition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODEL_PATH", raising=False)
    path = tmp_path / "run.sh"
    message = refusal(path, f"{before}\npython3 -m verl.trainer.main_ppo {WORDS}\n")
    assert "the script ends here before it trains: " in message
    assert condition in message
    assert f"MODEL_PATH=… quintet plan {path}" in message


def test_a_plan_does_not_say_that_a_default_is_replaced_beside_a_placement_that_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is that of the file's 8 GPUs, whatever this machine has."""
    tree = changed(PPO, {"trainer.n_gpus_per_node": 8, f"{ROLLOUT}.name": "vllm", f"{ACTOR}.ppo_mini_batch_size": 256})
    config = config_from_tree(tree, "run.yaml:1")
    planned = convert(config, DIALECTS["verl"], to_plan=True)
    assert planned_rank(planned.composed.experiment).size == 8
    assert not [remark for remark in planned.remarks if "needs more GPUs" in remark]
    assert [remark for remark in convert(config, DIALECTS["verl"]).remarks if "needs more GPUs" in remark]


def test_a_plan_shows_the_entropy_coefficient(tmp_path: Path) -> None:
    composed = converted(tmp_path, "verl", changed(PPO, {f"{ACTOR}.entropy_coeff": 0.001})).composed
    plan = plan_run(composed)
    assert "entropy × 0.001" in describe_run(plan.config, plan.models)["algorithm"]
