"""If these fail, `plan` and `train` read different models under a name, or a template without tools is noticed after
the model is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quintet.cli.choices import check_choices, unknown_choices
from quintet.cli.configuration import inspect_config, load_config
from quintet.config.compose import load_experiment
from quintet.config.plan.models import find_models
from quintet.config.run_name import default_run_name
from quintet.errors import ConfigError
from quintet.policies.model_loading import load_model, load_policy_tokenizer

NAME = "org/small"
WORDS = [f"policy.path={NAME}", "env.name=bandit"]
TOOLS = [
    "env.name=prompts",
    "data.train_files=[x.jsonl]",
    "rollout.tool_calls.tools={calculator: {}}",
    "rollout.max_turns=3",
]


def fill_cache(cache: Path, model: Path) -> Path:
    """Store a model as `hf download` does: links in a snapshot to files elsewhere in the cache."""
    entry = cache / "models--org--small"
    shutil.copytree(model, entry / "blobs")
    snapshot = entry / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    for file in (entry / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("0a1b")
    return snapshot


def test_a_name_of_the_hub_is_the_cached_model_for_plan_and_train(
    tmp_path: Path, policy_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = fill_cache(tmp_path, policy_directory)
    composed = load_config(None, WORDS, None, "refuse")
    config = composed.experiment
    assert config.policy.path == str(snapshot)
    assert composed.source("policy.path") == "command line"
    check_choices(composed)
    planned = find_models(inspect_config(None, WORDS, None, "refuse").composed.experiment)
    assert planned == find_models(config)
    tokenizer = load_policy_tokenizer(config.policy, snapshot)
    assert len(tokenizer) <= load_model(snapshot).config.vocab_size
    assert (config.name, default_run_name(config)) == ("bandit-small", "bandit-small")


def test_a_name_that_is_not_cached_says_how_to_get_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"(?s)policy.path = 'org/small' .*no such directory.*hf download org/small"):
        check_choices(load_config(None, WORDS, None, "refuse"))


def template_of(directory: Path, **files: str) -> list[str]:
    """Return the problems with the templates in a model's directory."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    composed = load_experiment(None, [*TOOLS, f"policy.path={directory}"])
    return [problem.message for problem in unknown_choices(composed) if problem.key == "data.template"]


def test_a_template_without_tools_is_noticed_before_a_model_is_loaded(tmp_path: Path) -> None:
    plain, with_tools = "{% for message in messages %}{{ message.content }}{% endfor %}", "{{ tools }}"
    message = "data.template = null (default): the chat template does not show tools"
    assert template_of(tmp_path / "a", chat_template__jinja=plain) == [message]
    assert template_of(tmp_path / "b", tokenizer_config__json=json.dumps({"chat_template": plain})) == [message]
    several = [{"name": "default", "template": plain}, {"name": "tool_use", "template": with_tools}]
    assert template_of(tmp_path / "c", tokenizer_config__json=json.dumps({"chat_template": several})) == []
    assert template_of(tmp_path / "d", chat_template__jinja=with_tools) == []
    assert template_of(tmp_path / "e", tokenizer_config__json="{}") == [], "it has none, which is another problem"


def test_the_template_of_the_user_counts_and_not_that_of_the_model(tmp_path: Path) -> None:
    def problems(name: str) -> list[str]:
        composed = load_experiment(None, [*TOOLS, f"data.template={name}"])
        return [problem.key for problem in unknown_choices(composed) if problem.key == "data.template"]

    assert problems("hermes") == []
    assert problems("chatml") == ["data.template"]
