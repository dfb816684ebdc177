"""If these fail, a model behind an endpoint gets another result than the same model evaluated directly."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from serving_clients import Client, hf_engine, served
from vision_models import save_qwen2_5_vl

from quintet.cli.evaluate import run
from quintet.cli.options import EvalOptions
from quintet.config.compose import load_experiment
from quintet.config.native.policy import VisionConfig
from quintet.errors import ConfigError
from quintet.pipelines.evaluate import evaluate_model
from quintet.pipelines.evaluation_results import Evaluation, Statistics
from quintet.policies.model_loading import load_model, load_tokenizer
from quintet.policies.tiny_models import Preset, build_model, train_tokenizer
from quintet.records import with_opened_thought
from quintet.rewards import chat_endpoint
from quintet.rollout.engines.openai_endpoint import UNLIMITED, EndpointSettings
from quintet.runtime.serving.build import build_chat_tokenizer

QUESTIONS = [
    {"data_source": "openai/gsm8k", "prompt": f"{n} + {n} = ?", "reward_model": {"ground_truth": str(2 * n)}}
    for n in range(6)
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that knows the words of replies, and says them now and then."""
    made = tmp_path_factory.mktemp("model")
    shape = Preset(hidden=32, layers=1, heads=4, kv_heads=2, mlp=64, vocabulary=300, context=512)
    tokenizer = train_tokenizer(shape.vocabulary, ["Down Up Left Right 0 1 2 3 4 5 6 7 8 9 ####"])
    model = build_model(shape, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=3)
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[Client]:
    engine = hf_engine(directory, max_model_len=512)
    with served(engine, directory) as made:
        yield made


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat_endpoint, "FIRST_PAUSE", 0.001)
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))


def evaluated(name: str, overrides: list[str], endpoint: EndpointSettings | None) -> Evaluation:
    limit = UNLIMITED if endpoint else 400
    run_overrides = [f"name={name}", "warm_start=null", "policy.preset=null", "policy.path=none", *overrides]
    run_overrides += [f"rollout.max_prompt_tokens={limit}", "rollout.max_response_tokens=12"]
    return evaluate_model(load_experiment(None, run_overrides), Statistics((1,)), Console(file=io.StringIO()), endpoint)


def both(client: Client, directory: Path, *overrides: str) -> tuple[Evaluation, Evaluation]:
    own = [*overrides, f"policy.path={directory}"]
    settings = EndpointSettings(f"{client.url}/v1", "tiny", max_concurrent=4, retries=0)
    return evaluated("direct", own, None), evaluated("asked", list(overrides), settings)


def lines(actual: Evaluation) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (actual.directory / "answers.jsonl").read_text().splitlines()]
    # an endpoint does not say whether its chat template has opened a thought that the text only closes
    return [
        {name: value for name, value in line.items() if name != "tokens"}
        | {"response": with_opened_thought(line["response"])}
        for line in records
    ]


DRAWN = "validation.sampling={do_sample: true, temperature: 1.0, top_k: 50, samples: 2}"
LAKE = ("env.name=frozenlake", "env.size=3", "validation.episodes=5", "rollout.max_turns=3", "rollout.think=false")
# an endpoint's vocabulary is not known, so that it would be told the form that this policy's vocabulary has
LAKE += ("rollout.format_instruction=false",)
ASKED = ("env.name=prompts", "data.train_files=[questions.jsonl]", "rollout.max_turns=1")


@pytest.mark.parametrize("how", ["validation.sampling.do_sample=false", DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("what", [LAKE, ASKED], ids=["episodes", "questions"])
def test_the_same_result_as_of_the_model_itself(
    client: Client, directory: Path, what: tuple[str, ...], how: str
) -> None:
    direct, asked = both(client, directory, *what, how)
    assert lines(asked) == lines(direct)
    assert {name: asdict(one) for name, one in asked.sources.items()} == {
        name: asdict(one) for name, one in direct.sources.items()
    }
    assert asked.metrics == direct.metrics
    assert asked.endpoint is not None
    assert asked.endpoint["failed"] == 0
    assert asked.endpoint["completion_tokens"] > 0
    assert json.loads((asked.directory / "results.json").read_text())["endpoint"] == asked.endpoint


def test_a_visual_environment_has_the_same_result_as_of_the_model_itself(tmp_path: Path) -> None:
    """The endpoint gets the pictures as files, and reduces them as the model's image processor does."""
    directory = save_qwen2_5_vl(tmp_path / "model")
    tokenizer = load_tokenizer(directory)
    chat_tokenizer = build_chat_tokenizer(load_model(directory), tokenizer, (tokenizer.eos_token_id,), VisionConfig())
    engine = hf_engine(directory, max_model_len=512)
    shown = ("env.render=vision", "env.tile_size=24", "rollout.window_size=1")
    texts = set()
    with served(engine, directory, chat_tokenizer=chat_tokenizer) as client:
        for how in ("validation.sampling.do_sample=false", DRAWN):
            direct, asked = both(client, directory, *LAKE, *shown, how)
            assert lines(asked) == lines(direct)
            assert asked.metrics == direct.metrics
            assert asked.endpoint
            assert asked.endpoint["failed"] == 0
            texts |= {line["response"] for line in lines(asked)}
    assert len(texts) > 5


def test_a_whole_history_keeps_its_tokens_in_a_session(client: Client, directory: Path) -> None:
    overrides = (*LAKE, "rollout.window_size=null")
    own = [*overrides, f"policy.path={directory}"]
    settings = EndpointSettings(f"{client.url}/sessions/lake/v1", "tiny", max_concurrent=4)
    assert lines(evaluated("asked", list(overrides), settings)) == lines(evaluated("direct", own, None))


def test_an_endpoint_that_fails_is_counted(client: Client) -> None:
    settings = EndpointSettings(f"{client.url}/v1", "another", max_concurrent=4, retries=0)
    actual = evaluated("asked", list(LAKE), settings)
    assert actual.failures == {"frozenlake": {"Http404": 5}}
    assert actual.endpoint == {
        "url": f"{client.url}/v1",
        "model": "another",
        "requests": 5,
        "failed": 5,
        "prompt_tokens": 0,
        "completion_tokens": 0,
    }
    answered = evaluated("asked", list(ASKED), settings)
    assert answered.failures == {"openai/gsm8k": {"Http404": 6}}


def asked_of(client: Client, **fields: Any) -> EvalOptions:
    return EvalOptions(endpoint=f"{client.url}/v1", endpoint_model="tiny", endpoint_retries=0, **fields)


def test_the_command_shows_the_table(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(None, ["size=3"], None, "refuse", asked_of(client, env="frozenlake", episodes=4)) == 0
    captured = capsys.readouterr()
    assert "4 answers" in captured.out
    assert "runs/eval-tiny-frozenlake/results.json" in captured.out
    assert (
        "max_prompt_tokens: 2147483647  # --endpoint" in Path("runs/eval-tiny-frozenlake/evaluation.yaml").read_text()
    )
    assert run(None, [], None, "refuse", asked_of(client, data="questions.jsonl", limit=2, name="mine")) == 0
    assert json.loads(Path("runs/mine/results.json").read_text())["answers"] == 2


def test_a_configurations_own_questions(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.yaml").write_text(
        "name: c\nenv: {name: prompts}\ndata: {train_files: questions.jsonl, validation_rows: 3}\n"
        "rollout: {max_turns: 1, max_prompt_tokens: 99, max_response_tokens: 4}\n"
    )
    assert run("config.yaml", [], None, "refuse", asked_of(client)) == 0
    assert "max_prompt_tokens = 99 (config.yaml:4) is ignored" in capsys.readouterr().err
    assert json.loads(Path("runs/eval-tiny/results.json").read_text())["answers"] == 3


@pytest.mark.parametrize(
    ("what", "overrides", "fields", "message"),
    [
        (None, [], {"env": "frozenlake", "endpoint_model": None}, "requires a model name"),
        (None, [], {"env": "frozenlake", "endpoint": "nowhere"}, "not an http"),
        (
            None,
            [],
            {"env": "frozenlake", "endpoint": None, "endpoint_retries": 2},
            "--endpoint-model is only valid with --endpoint",
        ),
        (None, ["rollout.max_prompt_tokens=9"], {"env": "frozenlake"}, "cannot be counted"),
        (None, ["rollout.max_start_tokens=9"], {"env": "frozenlake"}, "rollout.max_start_tokens needs"),
        (None, ["rollout.max_observation_tokens=9"], {"env": "frozenlake"}, "rollout.max_observation_tokens"),
        (None, ["data.template=chatml"], {"data": "questions.jsonl"}, "data.template needs the policy's tokens"),
        (None, ["reward.overlong.buffer=9"], {"data": "questions.jsonl"}, "reward.overlong needs the policy's tokens"),
    ],
)
def test_what_an_endpoint_cant_do_is_refused(
    client: Client, what: str | None, overrides: list[str], fields: dict[str, Any], message: str
) -> None:
    asked = EvalOptions(**{**asdict(asked_of(client)), **fields})
    with pytest.raises(ConfigError, match=message):
        run(what, overrides, None, "refuse", asked)


def test_a_model_and_an_endpoint_are_one_too_many(client: Client, directory: Path) -> None:
    with pytest.raises(ConfigError, match="mutually exclusive"):
        run(str(directory), [], None, "refuse", asked_of(client, env="frozenlake"))
