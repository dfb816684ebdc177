"""If these fail, a wrong key or value is met with a riddle instead of what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.config.compose import load_experiment
from quintet.config.problems import MAX_PROBLEMS
from quintet.config.schema import format_value, keys
from quintet.errors import ConfigError


def fault(overrides: list[str], path: str | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        load_experiment(path, overrides)
    return raised.value


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.stesp=3"], ["unknown key training.stesp = 3", "command line", "did you mean training.steps?"]),
        (["learning_rate=1"], ["learning_rate", "actor.optimizer.learning_rate"]),
        (["max_turn=1"], ["did you mean rollout.max_turns?"]),
        (["trainning.steps=3"], ["trainning", "did you mean training?"]),
        (["optimizer.learning_rate=1"], ["actor.optimizer or critic.optimizer"]),
        (["ROLLOUT.max_turns=1"], ["unknown key ROLLOUT", "did you mean rollout?"]),
        (["reward_kl.horizon=3"], ["unknown key reward_kl", "did you mean algorithm.reward_kl?"]),
        (["reward.reward.scale=2"], ["unknown key reward.reward", "did you mean reward?"]),
        (["sft.warmup_steps=3"], ["unknown key sft.warmup_steps", "did you mean sft.optimizer.warmup_steps?"]),
        (["warmup_steps=3"], ["did you mean critic.warmup_steps or "]),
        (
            ["env.processes.memoy_gib=1"],
            ["unknown key env.processes.memoy_gib", "did you mean env.processes.memory_gib?"],
        ),
        (["checkpoint.zzzz=1"], ["valid keys: every_steps, keep"]),
        (["env.name=sokobn"], ["env.name = 'sokobn'", "did you mean sokoban?"]),
        (["algorithm.advantage.name=ppo"], ["algorithm.advantage.name = 'ppo'", "valid: grpo, brpo, arpo"]),
        (["env.sizes=3"], ["unknown key env.sizes", "did you mean env.size?"]),
        (["env.name=sokoban", "env.boxs=3"], ["unknown key env.boxs", "did you mean env.boxes?"]),
        (["env.boxes=3"], ["it belongs to env.name=sokoban, and env.name is frozenlake"]),
        (["env.size=99"], ["env.size = 99", "an integer ≥ 2 and ≤ 32"]),
        (["training.steps=many"], ["training.steps = 'many'", "an integer ≥ 0"]),
        (["training.steps=1e3"], ["an integer ≥ 0", "training.steps=1000"]),
        (["training.steps=[1"], ["training.steps = '[1'"]),
        (["seed=true"], ["seed = true", "an integer"]),
        (["env.slippery=1"], ["env.slippery = 1", "true or false"]),
        (["rollout.temperature=0"], ["rollout.temperature = 0", "a number > 0 and ≤ 10"]),
        (["actor.optimizer.learning_rate=.inf"], ["actor.optimizer.learning_rate", "a number > 0"]),
        (["actor.optimizer.betas=[0.9]"], ["actor.optimizer.betas = [0.9]", "a list"]),
        (["actor.optimizer.betas=[0.9, 1.0]"], ["actor.optimizer.betas = [0.9, 1.0]", "< 1"]),
        (["tracking.loggers=5"], ["tracking.loggers = 5", "a list, each text"]),
        (["policy.dtype=float64"], ["one of float32, bfloat16"]),
        (["policy.path=x", "policy.preset=y"], ["policy.path = 'x' (command line)", "policy.preset=null"]),
        (["name=../x"], ["name = '../x'", "text that matches"]),
        (["training=5"], ["training = 5", "a section", "training.steps"]),
        (["training=null"], ["training = null", "a section"]),
        (["env=5"], ["env = 5", "a section", "env.name"]),
        (["training"], ["'training'", "key=value"]),
        (["+seed=1"], ["'+seed=1'", "key=value"]),
        (["=1"], ["'=1'", "key=value"]),
    ],
)
def test_faults_name_key_value_and_remedy(overrides: list[str], words: list[str]) -> None:
    message = str(fault(overrides if "=" in overrides[0] else ["seed=1", *overrides]))
    for word in words:
        assert word in message, message
    for foreign in ("tagged", "pydantic", "Config", "Input should", "frozenlake.size", "sokoban."):
        assert foreign not in message, message


def test_a_number_in_a_file_is_no_text_and_the_message_says_how_to_write_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: 2026\n")
    message = str(fault([], str(path)))
    assert "name = 2026" in message
    assert "quotes" in message


@pytest.mark.parametrize("word", ["no", "2026", "1e3", "null_model"])
def test_a_word_of_the_command_line_is_text_for_a_key_that_takes_text(word: str) -> None:
    assert load_experiment(None, [f"name={word}"]).experiment.name == word


def test_all_faults_come_in_one_message_each_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("sede: 3\ntraining:\n  steps: -1\nenv: {name: sokoban, width: 3}\nrollout.max_turns: 3\n")
    error = fault(["validation.gams=3"], str(path))
    for line in (
        f"unknown key sede = 3 ({path}:1)",
        f"training.steps = -1 ({path}:3)",
        f"env.width = 3 ({path}:4)",
        f"unknown key rollout.max_turns = 3 ({path}:5)",
        "nest it: `max_turns:`",
        "unknown key validation.gams = 3 (command line)",
    ):
        assert line in str(error), str(error)
    assert (error.key, error.value, error.source) == ("env.width", 3, f"{path}:4")


NEEDED = {
    "reward.model.": ["reward.model.path=x"],
    "reward.judge.": ["reward.judge.url=http://127.0.0.1:1/v1", "reward.judge.model=x"],
    "reward.judge.server.": ["reward.judge.url=null", "reward.judge.model=null", "reward.judge.server.path=x"],
    "reward.verifiers.*.judge.": [
        "reward.verifiers.*.judge.url=http://127.0.0.1:1/v1",
        "reward.verifiers.*.judge.model=x",
    ],
    "reward.verifiers.*.judge.server.": [
        "reward.verifiers.*.judge.url=null",
        "reward.verifiers.*.judge.model=null",
        "reward.verifiers.*.judge.server.path=x",
    ],
    "reward.overlong.": ["reward.overlong.buffer=1"],
    "data.domains.*.": ["data.domains.*.share=1.0"],
    "evaluation.": ["evaluation.path=x"],
    "generation.": ["generation.output_path=x.parquet", "env.name=prompts", "data.train_files=[x.jsonl]"],
    "env.service.": ["env.service.urls=[http://127.0.0.1:1]"],
    "validation.simulator.service.": ["validation.simulator.service.urls=[http://127.0.0.1:1]"],
    "envs.*.env.service.": ["envs.*.env.service.urls=[http://127.0.0.1:1]"],
    "rollout.tool_calls.": [
        "rollout.tool_calls.tools={calculator: {}}",
        "env.name=prompts",
        "data.train_files=[x.jsonl]",
    ],
    "rollout.interactions.": [
        "rollout.interactions.users={gsm8k: {}}",
        "env.name=prompts",
        "data.train_files=[x.jsonl]",
    ],
    "algorithm.reward_kl.": ["algorithm.kl={}"],
    "rollout.state_reward.": ["rollout.thoughts=grounding_worldmodeling"],
    "rollout.state_reward.judge.": [
        "rollout.state_reward.scorer=judge",
        "rollout.state_reward.judge.url=http://127.0.0.1:1/v1",
        "rollout.state_reward.judge.model=x",
    ],
}
"""What a section can't be without."""
BESIDE = {
    "algorithm.advantage.name=custom": ["algorithm.advantage.function=x.py:y"],
    "algorithm.loss.name=custom": ["algorithm.loss.function=x.py:y"],
    "algorithm.loss.name=distillation": ["reference.path=x"],
    "env.name=custom": ["env.path=x.py:y"],
    "envs.*.env.name=custom": ["envs.*.env.path=x.py:y"],
}
"""What a choice can't be without."""


def test_every_kind_of_env_and_algorithm_can_be_chosen_with_its_own_keys() -> None:
    """A key that the reference page lists is legal beside its choice."""
    for key in keys():
        if key.is_section or key.default is None:
            continue
        choice = [f"{key.choice[0]}={key.choice[1].split(' | ')[0]}"] if key.choice else []
        if choice == ["envs.*.env.name=prompts"]:
            continue  # questions aren't mixed with envs
        choice += [word for section, words in NEEDED.items() if key.name.startswith(section) for word in words]
        choice += [word for kind, words in BESIDE.items() if kind in choice for word in words]
        load_experiment(
            None, [word.replace("*", "lake", 1) for word in (*choice, f"{key.name}={format_value(key.default)}")]
        )


def test_a_wrong_value_of_a_named_entry_is_explained_like_any_other() -> None:
    prompts = ["env.name=prompts", "data.train_files=[x.jsonl]"]
    with pytest.raises(ConfigError, match=r"data\.domains\.a\.share = 'x' .*: must be a number ≥ 0 and ≤ 1"):
        load_experiment(None, [*prompts, "data.domains={a: {share: x}}"])
    with pytest.raises(ConfigError, match=r"did you mean data\.domains\.a\.share\?"):
        load_experiment(None, [*prompts, "data.domains={a: {shre: 1.0}}"])


def test_a_verifier_of_no_domain_is_refused() -> None:
    words = ["env.name=prompts", "data.train_files=[x.jsonl]", "data.domains={sums: {share: 1.0}}"]
    with pytest.raises(ConfigError, match="no domain has this name; the domains are sums"):
        load_experiment(None, [*words, "reward={kind: math, verifiers: {sum: {kind: exact}}}"])


def test_a_target_that_steers_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="`target` needs a reward penalty"):
        load_experiment(None, ["algorithm.kl={target: 0.1}"])


def test_of_thousands_of_problems_the_first_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each suggestion takes milliseconds: those of 3,000 unknown keys took a minute."""
    suggested: list[str] = []

    def suggest(key: str, *arguments: object) -> str:
        suggested.append(key)
        return f"hint for {key}"

    monkeypatch.setattr("quintet.config.validation._suggestion", suggest)
    with pytest.raises(ConfigError) as error:
        load_experiment(None, [f"unknown_{number}=1" for number in range(3000)])
    assert len(suggested) <= MAX_PROBLEMS + 1
    lines = str(error.value).splitlines()
    assert len(lines) == 2 * MAX_PROBLEMS + 1
    assert lines[-1] == "there are further problems: correct these first"
