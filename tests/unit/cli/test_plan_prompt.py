"""If these fail, people learn what their model was asked only from a run that has failed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quintet.cli import main as command
from quintet.rollout.engines.openai_endpoint import message_tokenizer

MODEL = {"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 300}
BOX = """
from quintet.records import Observation, Step

class Box:
    actions = ("Look", "Take({number})")

    def instruction(self):
        return "Find the box."

    def reset(self, seed):
        if BROKEN:
            raise OSError("no boxes")
        return Observation(f"boxes of room {seed}")

    def step(self, action):
        return Step(Observation("no box"), 0.0, False, False, {"success": False})

    def close(self):
        pass
"""
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run `quintet plan --prompt` and return its exit status and output."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["quintet", "plan", *arguments, "--prompt"])
        with pytest.raises(SystemExit) as end:
            command.main()
        return int(end.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def own_env(tmp_path: Path) -> list[str]:
    """Overrides of a chat model, whose weights do not exist, in an env of the user."""
    (tmp_path / "box.py").write_text(f"BROKEN = False\n{BOX}")
    model = tmp_path / "model"
    message_tokenizer().save_pretrained(model)
    (model / "config.json").write_text(json.dumps(MODEL))
    env = ["env.name=custom", f"env.path={tmp_path / 'box.py'}:Box", "warm_start=null"]
    return [*env, f"policy.path={model}", "policy.preset=null", "rollout.max_prompt_tokens=900"]


def test_the_first_prompt_of_an_own_env_is_shown_as_the_model_sees_it(plan: Call, own_env: list[str]) -> None:
    status, shown, _ = plan(*own_env)
    assert status == 0
    assert "Find the box.\nAlways respond in this form and add nothing else: <think>[your thoughts]</think>" in shown
    assert "Actions: Look, Take({number}), with a number in place of {number}" in shown
    status, shown, _ = plan(*own_env, "rollout.format_instruction=false", "--json")
    (prompt,) = json.loads(shown)
    assert (status, prompt["source"], "Always respond" in prompt["text"]) == (0, "custom", False)
    # one token per byte, and markers around the messages
    assert prompt["text"].count("Find the box.") == 1
    assert prompt["tokens"] > len("Find the box.boxes of room 0")


def test_the_plan_of_a_pretrained_policy_points_to_its_first_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_env: list[str]
) -> None:
    line = "`quintet plan --prompt` shows the first one as the policy sees it"
    for overrides, is_shown in ((own_env, True), ([], False)):
        monkeypatch.setattr(sys, "argv", ["quintet", "plan", *overrides])
        with pytest.raises(SystemExit):
            command.main()
        assert (line in capsys.readouterr().out) is is_shown


def test_of_a_preset_the_messages_are_shown(plan: Call) -> None:
    status, shown, _ = plan()
    assert status == 0
    assert "frozenlake: messages; the tokenizer of a preset is made when the run starts" in shown
    assert "system: Reach the goal G over the frozen lake." in shown
    assert "Always respond" not in shown


def test_the_first_row_of_a_data_file_is_shown_with_the_template(
    plan: Call, own_env: list[str], tmp_path: Path
) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"What is 2 + {n}?"}], "answer": "4"} for n in range(2)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    overrides = ["env.name=prompts", f"data.train_files=[{data}]", *own_env[2:]]
    status, shown, _ = plan(*overrides, "--json")
    (prompt,) = json.loads(shown)
    assert status == 0
    assert prompt["source"] == str(data)
    assert "What is 2 + 0?" in prompt["text"]
    assert "Always respond" not in prompt["text"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["policy.path=/nowhere"], "policy.path = '/nowhere' (command line): no such directory"),
        (["env.name=prompts", "data.train_files=[a.jsonl]", "policy.path=null", "policy.preset=grid-1m"], "a preset"),
    ],
)
def test_what_is_missing_for_the_prompt_is_named(
    plan: Call, own_env: list[str], change: list[str], message: str
) -> None:
    status, _, errors = plan(*[each for each in own_env if not each.startswith("env.")], *change)
    assert (status, message in errors) == (2, True), errors


def test_an_env_that_fails_is_named_with_its_error(plan: Call, own_env: list[str], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(f"BROKEN = True\n{BOX}")
    status, _, errors = plan(*own_env, f"env.path={tmp_path / 'broken.py'}:Box")
    assert status != 0
    assert "the environment fails: OSError: no boxes" in errors
