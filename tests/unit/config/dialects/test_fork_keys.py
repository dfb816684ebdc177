"""If these fail, keys that only a fork of a framework reads are called typos, or are dropped without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.cli import explain
from quintet.cli.configuration import inspect_config, load_config, states_of_run
from quintet.config.key_states import State
from quintet.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
TREE = """\
data: {train_batch_size: 32, max_obs_length: 500}
actor_rollout_ref:
  model: {path: models/small}
  actor: {ppo_mini_batch_size: 16, ppo_micro_batch_size_per_gpu: 1, state_masking: false}
  rollout: {name: hf, n: 4, n_agent: 1, n_val: 1, val_temperature: 0.6}
algorithm: {adv_estimator: grpo}
retriever: {url: null, topk: 3}
trainer: {n_gpus_per_node: 1, nnodes: 1}
"""
PLAIN = (
    "data.train_files=a.parquet data.val_files=b.parquet data.train_batch_size=32 algorithm.adv_estimator=grpo"
    f" actor_rollout_ref.model.path=models/small {ROLLOUT}.name=hf {ROLLOUT}.n=4 trainer.n_gpus_per_node=1"
    " trainer.nnodes=1 actor_rollout_ref.actor.ppo_mini_batch_size=16"
    " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
)
FORK_KEYS = ("data.max_obs_length", f"{ROLLOUT}.n_agent", f"{ROLLOUT}.val_temperature", "retriever.topk")
"""Keys of forks that are similar to keys of verl."""


def program(config: str = "ppo_trainer") -> str:
    return f"@hydra.main(config_path='config', config_name='{config}', version_base=None)\ndef main(config): ...\n"


def checkout(root: Path, module: str = "verl.trainer.main_ppo", tree: str = TREE) -> None:
    """Write a trainer and its configuration file as a fork has them."""
    file = root / f"{module.replace('.', '/')}.py"
    (file.parent / "config").mkdir(parents=True)
    file.write_text(program())
    (file.parent / "config/ppo_trainer.yaml").write_text(tree)


def script(root: Path, words: str, module: str = "verl.trainer.main_ppo") -> str:
    path = root / "scripts/run.sh"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"python3 -m {module} {PLAIN} \\\n {words}\n")
    return str(path)


def waiting(config: str, *overrides: str, unknown: str = "refuse") -> dict[str, str]:
    inspected = inspect_config(config, list(overrides), None, unknown)
    return {problem.key: problem.message for problem in inspected.unsupported if "waits: key of" in problem.message}


def refusal(config: str, *overrides: str, unknown: str = "refuse") -> str:
    with pytest.raises(ConfigError) as error:
        inspect_config(config, list(overrides), None, unknown)
    return str(error.value)


def test_a_key_of_the_forks_own_tree_waits_and_the_arithmetic_is_planned(tmp_path: Path) -> None:
    checkout(tmp_path)
    config = script(tmp_path, " ".join(f"{key}=5" for key in FORK_KEYS))
    waits = waiting(config)
    assert sorted(waits) == sorted(FORK_KEYS)
    place = f"{tmp_path}/verl/trainer/config/ppo_trainer.yaml:5"
    assert waits[f"{ROLLOUT}.n_agent"] == f"{ROLLOUT}.n_agent = 5 ({config}:2) waits: key of this fork ({place})"
    composed = inspect_config(config, [], None, "refuse").composed
    assert any(f"~{ROLLOUT}.n_agent leaves out one, --ignore-fork-keys those" in line for line in composed.remarks)
    assert (composed.experiment.training.groups_per_step, composed.experiment.training.samples_per_group) == (32, 4)


def test_training_without_a_key_of_a_fork_is_refused_with_both_ways_to_leave_it_out(tmp_path: Path) -> None:
    checkout(tmp_path)
    config = script(tmp_path, f"{ROLLOUT}.n_agent=5 {ROLLOUT}.val_temperature=1")
    with pytest.raises(ConfigError) as error:
        load_config(config, [], None, "refuse")
    assert f"without it: ~{ROLLOUT}.n_agent (it may decide what is trained)" in str(error.value)
    assert f"without it: ~{ROLLOUT}.val_temperature or --ignore-fork-keys" in str(error.value)
    assert waiting(config, f"~{ROLLOUT}.n_agent", f"~{ROLLOUT}.val_temperature") == {}


def test_ignoring_keys_of_a_fork_keeps_those_that_may_decide_what_is_trained(tmp_path: Path) -> None:
    checkout(tmp_path)
    words = f"{ROLLOUT}.n_agent=5 {ROLLOUT}.n_val=8 {ROLLOUT}.val_temperature=1 +trainer.score_test_only=true"
    config = script(tmp_path, words)
    assert sorted(waiting(config, unknown="ignore-fork")) == [f"{ROLLOUT}.n_agent", "trainer.score_test_only"]
    remarks = inspect_config(config, [], None, "ignore-fork").composed.remarks
    keys = ", ".join(f"{ROLLOUT}.{key} ({config}:2)" for key in ("n_val", "val_temperature"))
    assert f"unknown keys left out, which a fork reads: {keys}" in remarks


def test_unknown_keys_warn_leaves_out_every_unknown_key(tmp_path: Path) -> None:
    checkout(tmp_path)
    config = script(tmp_path, f"{ROLLOUT}.n_agent=5 data.train_batch_sise=64 trainer.zebra=1")
    inspected = inspect_config(config, [], None, "warn")
    left_out = [remark for remark in inspected.composed.remarks if "left out" in remark]
    for key in (f"{ROLLOUT}.n_agent", "data.train_batch_sise", "trainer.zebra"):
        assert sum(f"{key} (" in remark for remark in left_out) == 1
    assert inspected.composed.experiment.training.groups_per_step == 32


def test_a_key_of_a_fork_is_counted_as_waiting_and_explained_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout(tmp_path)
    config = script(tmp_path, f"{ROLLOUT}.n_agent=5")
    states = {each.setting.key: each.state for each in states_of_run(config, [], None)}
    assert states[f"{ROLLOUT}.n_agent"] is State.WAITS
    explain.run([config, f"{ROLLOUT}.n_agent"], None, every=False, metrics=False, as_json=False)
    shown = capsys.readouterr().out
    assert f"{ROLLOUT}.n_agent = 5  ({config}:2)\n  state    waits for a capability: " in shown
    assert "key of this fork" in shown


def test_a_feature_of_a_fork_that_is_turned_off_does_not_wait(tmp_path: Path) -> None:
    checkout(tmp_path)
    config = script(tmp_path, "actor_rollout_ref.actor.state_masking=false retriever.url=null")
    assert waiting(config) == {}
    assert sorted(waiting(config, "actor_rollout_ref.actor.state_masking=true", "retriever.url=http://x")) == [
        "actor_rollout_ref.actor.state_masking",
        "retriever.url",
    ]


def test_a_typo_in_a_script_of_a_fork_stays_a_typo(tmp_path: Path) -> None:
    checkout(tmp_path)
    config = script(tmp_path, "actor_rollout_ref.actor.ppo_mini_bach_size=3 +max_turns=3")
    message = refusal(config)
    assert "ppo_mini_bach_size" in message
    assert "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?" in message


def test_a_plus_says_that_a_key_is_new_unless_it_is_next_to_one_in_its_section(tmp_path: Path) -> None:
    new = ("actor_rollout_ref.actor.loss_mode", f"{ROLLOUT}.n_agent", "env.env_name", "max_turns", "data.temperature")
    config = script(tmp_path, " ".join(f"+{key}=2" for key in new))
    assert sorted(waiting(config)) == sorted(new)
    message = refusal(script(tmp_path, "+data.train_batch_sizes=2"))
    assert "looks like a typo; did you mean data.train_batch_size?" in message


def test_without_a_checkout_a_key_with_a_name_of_its_own_is_a_forks(tmp_path: Path) -> None:
    keys = (f"{ROLLOUT}.n_val", f"{ROLLOUT}.val_temperature", "data.max_obs_length", "env.env_name", "retriever.topk")
    waits = waiting(script(tmp_path, " ".join(f"{key}=2" for key in keys)))
    assert sorted(waits) == sorted(keys)
    assert "key of a fork, since verl has no such key" in waits["env.env_name"]
    assert f"the most similar one is {ROLLOUT}.temperature" in waits[f"{ROLLOUT}.val_temperature"]
    for typo in ("data.train_size", "actor_rollout_ref.actor.loss_mode", f"{ROLLOUT}.temperatur", "data.temperature"):
        assert "looks like a typo" in refusal(script(tmp_path, f"{typo}=2"))


def test_a_key_on_the_command_line_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    config = script(tmp_path, "")
    assert "unknown key trainer.zebra (command line) does not exist in verl" in refusal(config, "trainer.zebra=1")
    assert sorted(waiting(config, "+trainer.zebra=1")) == ["trainer.zebra"]


@pytest.mark.parametrize("root", [".", "src", "training/code"])
def test_a_trainer_of_a_fork_with_verls_arguments_is_read_as_verl(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own file is the configuration, as `@hydra.main` says; its keys have the defaults that the authors chose,
    except the one that the script sets."""
    monkeypatch.chdir(tmp_path)
    module = "zero_reasoner.main_azr_ppo"
    checkout(tmp_path / root, module)
    path = tmp_path / "run.sh"
    path.write_text(f"\npython -m {module} data.train_batch_size=64 {ROLLOUT}.n_agent=2\n")
    inspected = inspect_config("run.sh", [], None, "refuse")
    assert f"run.sh:2: {module} is read as verl's trainer: its arguments are verl's" in capsys.readouterr().err
    assert inspected.dialect == "verl"
    experiment = inspected.composed.experiment
    assert (experiment.training.groups_per_step, experiment.training.samples_per_group) == (64, 4)
    assert sorted(waiting("run.sh")) == [f"{ROLLOUT}.n_agent"]


def test_a_file_of_the_forks_own_trainer_has_no_typos(tmp_path: Path) -> None:
    checkout(tmp_path)
    config = tmp_path / "verl/trainer/config/ppo_trainer.yaml"
    assert sorted(waiting(str(config))) == sorted((*FORK_KEYS, f"{ROLLOUT}.n_val"))
    copy = tmp_path / "mine.yaml"
    copy.write_text(TREE.replace("n_agent", "temperatur"))
    assert f"did you mean {ROLLOUT}.temperature?" in refusal(str(copy))


def test_a_program_whose_arguments_are_those_of_no_framework_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("cd x\npython3 -m my_lab.train lr=1e-6 model=small\n")
    assert f"{path}:2 runs my_lab.train, whose arguments are those of no framework" in refusal(str(path))


def test_a_run_of_easyr1_is_recognised_for_what_it_is(tmp_path: Path) -> None:
    tree = (
        "data: {train_files: a, rollout_batch_size: 512}\nworker: {actor: {global_batch_size: 128}, rollout: {n: 5}}\n"
    )
    (tmp_path / "config.yaml").write_text(tree)
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main config=config.yaml worker.rollout.n=4\n")
    for name in ("config.yaml", "run.sh"):
        assert "configurations of EasyR1" in refusal(str(tmp_path / name))


LOOP = "class RayTrainer:\n    def fit(self):\n        {call}\n"
IMPORT = "from verl.trainer.ppo.ray_trainer import RayTrainer\n"


def with_code(root: Path, loop: str, actor: str = "clip_ratio_c", algorithms: str = "") -> None:
    """Add the modules of the trainer to a checkout."""
    checkout(root)
    main = root / "verl/trainer/main_ppo.py"
    main.write_text(IMPORT + main.read_text())
    texts = {"trainer/ppo/ray_trainer.py": loop, "workers/actor/dp_actor.py": actor}
    for name, text in (texts | {"trainer/ppo/core_algos.py": algorithms}).items():
        file = root / "verl" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def algorithm(config: str) -> tuple[bool, float | None]:
    """Return whether the plan subtracts KL from the rewards, and its bound for negative advantages."""
    found = inspect_config(config, [], None, "refuse").composed.experiment.algorithm
    return found.kl_in_reward is not None, getattr(found.loss, "clip_dual", None)


@pytest.mark.parametrize(
    ("call", "has_kl"),
    [
        ("batch = apply_kl_penalty(batch)", True),
        ("# batch = apply_kl_penalty(batch)", False),
        ("if self.config.algorithm.use_kl_in_reward: batch = apply_kl_penalty(batch)", False),
    ],
)
def test_kl_in_the_rewards_is_planned_that_the_code_of_a_fork_lacks(tmp_path: Path, call: str, has_kl: bool) -> None:
    with_code(tmp_path, LOOP.format(call=call))
    assert algorithm(script(tmp_path, "algorithm.kl_ctrl.kl_coef=0.001"))[0] is has_kl


@pytest.mark.parametrize(("actor", "bound"), [("clip_ratio_c = 3", 3.0), ("# clip_ratio_c", None), ("", None)])
def test_a_dual_clip_is_planned_that_the_code_of_a_fork_lacks(tmp_path: Path, actor: str, bound: float | None) -> None:
    with_code(tmp_path, LOOP.format(call="pass"), actor)
    assert algorithm(script(tmp_path, ""))[1] == bound


def test_a_mini_batch_is_refused_that_the_code_of_a_fork_does_not_check(tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    check = f"assert config.data.train_batch_size >= config.{key}"
    method = "pass\n    def _validate_config(self): "
    with_code(tmp_path, LOOP.format(call=f"{method}{check}"))
    assert "ppo_mini_batch_size = 64" in refusal(script(tmp_path, ""), f"{key}=64")
    (tmp_path / "verl/trainer/ppo/ray_trainer.py").write_text(LOOP.format(call=f"{method}..."))
    plan = inspect_config(script(tmp_path, ""), [f"{key}=64"], None, "refuse")
    assert plan.composed.experiment.training.mini_batches == 1


MANAGER, ESTIMATOR = "reward_model.reward_manager", "algorithm.adv_estimator"


def test_a_value_that_only_the_code_of_a_fork_has_is_refused(tmp_path: Path) -> None:
    with_code(tmp_path, LOOP.format(call='if name == "searching": ...'), algorithms="GIGPO = 'gigpo'\n")
    words = f"{MANAGER}=searching {ESTIMATOR}=gigpo"
    found = inspect_config(script(tmp_path, words), [], None, "refuse")
    waits = {each.key: each.message for each in found.unsupported if "waits: value of this fork" in each.message}
    assert set(waits) == {MANAGER, ESTIMATOR}
    assert "planned as 'naive'" in waits[MANAGER]
    assert found.composed.experiment.algorithm.advantage.name == "grpo"  # without a critic


@pytest.mark.parametrize(
    ("value", "code", "of_fork"),
    [
        ("serching", 'if name == "searching": ...', False),
        # "prime" with a slip, which the code has for another reason
        ("prim", 'graph.add("prim")', False),
        ("prim", 'if name == "prim": ...', True),
        ("prim", '@register("prim")\n', True),
        ("prim", "PRIM = 'prim'\n", True),
        ("prim", "MANAGERS = {'naive': Naive, 'prim': Prim}\n", True),
        ("prim", "if name in ['naive', 'prim']: ...", True),
    ],
)
def test_a_misspelt_value_waits_for_the_code_of_a_fork(tmp_path: Path, value: str, code: str, of_fork: bool) -> None:
    with_code(tmp_path, LOOP.format(call="pass"), algorithms=f"{code}\n")
    if of_fork:
        assert inspect_config(script(tmp_path, f"{MANAGER}={value}"), [], None, "refuse").unsupported
    else:
        assert "must be one of naive" in refusal(script(tmp_path, f"{MANAGER}={value}"))


def test_a_value_that_only_tests_have_waits_for_the_code_of_a_fork(tmp_path: Path) -> None:
    with_code(tmp_path, LOOP.format(call="pass"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_managers.py").write_text("NAMES = ['searching']\n")
    assert "must be one of naive" in refusal(script(tmp_path, f"{MANAGER}=searching"))


def test_a_value_of_a_fork_is_trained_without_its_code(tmp_path: Path) -> None:
    with_code(tmp_path, LOOP.format(call='if name == "searching": ...'))
    with pytest.raises(ConfigError, match="waits: value of this fork"):
        load_config(script(tmp_path, f"{MANAGER}=searching"), [], None, "refuse")


def test_an_unknown_value_of_a_key_of_a_fork_is_refused(tmp_path: Path) -> None:
    """What a program prints is not known, and no key of the framework follows from it."""
    checkout(tmp_path)
    found = waiting(script(tmp_path, f"{ROLLOUT}.n_agent=$(hostname -i)"))
    assert set(found) == {f"{ROLLOUT}.n_agent"}
    assert f"{ROLLOUT}.n = $" not in str(found)
    assert "set it on the command line" in refusal(script(tmp_path, f"{ROLLOUT}.n=$(hostname -i)"))


def test_a_logger_of_a_fork_is_refused_or_takes_the_others_along(tmp_path: Path) -> None:
    with_code(tmp_path, LOOP.format(call='if name == "board": ...'))
    found = inspect_config(script(tmp_path, "trainer.logger=[console,board]"), [], None, "refuse")
    waits = {each.key: each.message for each in found.unsupported if "waits: value of this fork" in each.message}
    assert 'planned as ["console"]' in waits["trainer.logger"]
    assert "trainer.logger" in refusal(script(tmp_path, "trainer.logger=[console,bord]"))


def test_a_key_of_another_run_in_a_trainers_own_file_is_called_one_of_a_fork(tmp_path: Path) -> None:
    """RLinf's `examples/reward/train_reward_model.py` has a file of its own, whose run waits as a whole."""
    program = '@hydra.main(config_path="config", config_name="reward_training")\ndef main(cfg): ...\n'
    (tmp_path / "train_reward_model.py").write_text(program)
    path = tmp_path / "config/reward_training.yaml"
    path.parent.mkdir()
    path.write_text(
        "cluster: {num_nodes: 1, component_placement: {actor: 0-0}}\nrunner: {task_type: sft}\n"
        "actor: {enable_offload: false, training_backend: fsdp, fsdp_config: {strategy: fsdp}}\n"
    )
    waits = [each.message for each in inspect_config(str(path), [], None, "refuse").unsupported]
    assert any("actor.fsdp_config.strategy" in each and "RLinf's supervised runs" in each for each in waits)
    assert not any("this fork" in each for each in waits)
