"""If these fail, a slip in a free-form section reaches an engine or a model, or a right entry is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from foreign import machine

from quintet.config.dialects.composition.foreign_config import ForeignConfig, compose_config
from quintet.config.dialects.loader import convert, load_config
from quintet.config.dialects.passthrough import engine_arguments
from quintet.config.dialects.registry import DIALECTS
from quintet.config.translate import translate
from quintet.errors import ConfigError

CONFIG = {"hidden_size": 8, "attention_dropout": 0.0, "rope_scaling": {"factor": 2.0, "type": "linear"}}
MODEL = "actor_rollout_ref.model"
ENTRIES = f"{MODEL}.override_config.model_config"
ENGINE = "actor_rollout_ref.rollout.engine_kwargs"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def given(tmp_path: Path, *words: str, text: str = "actor_rollout_ref: {rollout: {name: hf}}\n") -> ForeignConfig:
    path = tmp_path / "main.yaml"
    path.write_text(text)
    return compose_config(path, words)


def refusal(found: ForeignConfig, dialect: str = "verl", *, to_run: bool = False) -> str:
    with pytest.raises(ConfigError) as error:
        (load_config if to_run else convert)(found, DIALECTS[dialect])
    return str(error.value)


def test_entries_of_a_model_are_those_of_its_config(model: Path, tmp_path: Path) -> None:
    words = [f"{MODEL}.path={model}", f"{ENTRIES}={{attention_droput: 0.1, rope_scaling: {{factr: 3}}, zebra: 1}}"]
    message = refusal(given(tmp_path, *words))
    for part in (
        f"{ENTRIES}.attention_droput = 0.1 (command line): {model}/config.json has no attention_droput\n"
        f"  did you mean {ENTRIES}.attention_dropout?",
        f"{ENTRIES}.rope_scaling.factr = 3 (command line): {model}/config.json has no factr\n"
        f"  did you mean {ENTRIES}.rope_scaling.factor?",
        f"{ENTRIES}.zebra = 1 (command line): {model}/config.json has no zebra\n  leave it out",
    ):
        assert part in message, message


def test_right_entries_and_those_of_every_model_pass(model: Path, tmp_path: Path) -> None:
    entries = "{attention_dropout: 0.1, rope_scaling: {factor: 3}, use_cache: false, attn_implementation: sdpa}"
    found = convert(given(tmp_path, f"{MODEL}.path={model}", f"{ENTRIES}={entries}"), DIALECTS["verl"])
    assert not [remark for remark in found.composed.remarks if "checked" in remark]


def test_a_critics_entries_are_those_of_its_own_model(model: Path, tmp_path: Path) -> None:
    critic = "critic.model.override_config.model_config.hidden_sise=4"
    assert "model_config.hidden_size?" in refusal(given(tmp_path, f"{MODEL}.path={model}", critic))


def test_a_model_in_the_cache_of_the_hub_is_looked_into(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    words = [f"{MODEL}.path=some/model", f"{ENTRIES}.hidden_sise=1"]
    found = convert(given(tmp_path, *words), DIALECTS["verl"])
    (remark,) = [remark for remark in found.composed.remarks if "checked" in remark]
    assert remark == f"{ENTRIES} (command line) was not checked: there is no config.json of some/model on this machine"
    snapshot = tmp_path / "hub/models--some--model/snapshots/abc"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    assert f"did you mean {ENTRIES}.hidden_size?" in refusal(given(tmp_path, *words))


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000])
def test_a_broken_config_is_no_traceback(text: str, model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text(text)
    convert(given(tmp_path, f"{MODEL}.path={model}", f"{ENTRIES}.hidden_size=1"), DIALECTS["verl"])


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("vllm.enable_prefix_cachin", "vllm.enable_prefix_caching"),
        ("vllm.maxNumSeqs", "vllm.max_num_seqs"),
        ("sglang.mem_fraction_statik", "sglang.mem_fraction_static"),
        ("sglang.attention-backend", "sglang.attention_backend"),
    ],
)
def test_slips_in_an_engines_arguments_are_named(written: str, right: str, tmp_path: Path) -> None:
    message = refusal(given(tmp_path, f"++{ENGINE}.{written}=1"))
    assert f"unknown key {ENGINE}.{written} (command line) looks like a typo; did you mean {ENGINE}.{right}?" in message


def test_an_engines_arguments_reach_it_and_those_of_another_are_told(tmp_path: Path) -> None:
    words = [
        "actor_rollout_ref.rollout.name=vllm",
        f"{ENGINE}.vllm.compilation_config={{level: 3}}",
        f"+{ENGINE}.vllm.enable_prefix_caching=false",
        f"+{ENGINE}.sglang.mem_fraction_static=0.5",
        f"{ENGINE}.vllm.seed=null",
    ]
    found = convert(given(tmp_path, *words), DIALECTS["verl"])
    options = found.composed.experiment.rollout.engine_options
    assert options.arguments == {"compilation_config": {"level": 3}, "enable_prefix_caching": False}
    idle = [remark for remark in found.composed.remarks if "mem_fraction_static = 0.5" in remark]
    assert idle == [f"{ENGINE}.sglang.mem_fraction_static = 0.5 has no effect: the engine is vllm"]
    assert translate(found.composed, DIALECTS["verl"]).lost == {}


def test_an_engines_arguments_are_refused_where_hf_generates_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, gpus=0)
    words = [f"{ENGINE}.vllm.compilation_config={{level: 3}}", "trainer.n_gpus_per_node=2"]
    message = refusal(given(tmp_path, *words, text="actor_rollout_ref: {model: {path: x}}\n"), to_run=True)
    assert f"{ENGINE}.vllm.compilation_config.level = 3 (command line): the engine hf has no such option" in message
    assert "vllm is not installed here" in message


def test_rolls_options_are_those_of_the_strategy(tmp_path: Path) -> None:
    text = "actor_infer:\n  strategy_args: {strategy_name: NAME, strategy_config: {max_num_seqs: 8}}\nactor_train: {}\n"
    section = "actor_infer.strategy_args.strategy_config"
    found = convert(given(tmp_path, text=text.replace("NAME", "vllm")), DIALECTS["roll"])
    assert found.composed.experiment.rollout.engine_options.arguments == {"max_num_seqs": 8}
    assert translate(found.composed, DIALECTS["roll"]).lost == {}
    slip = given(tmp_path, text=text.replace("NAME", "vllm").replace("max_num_seqs", "max_num_sqs"))
    assert f"did you mean {section}.max_num_seqs?" in refusal(slip, "roll")


def test_the_arguments_are_those_of_the_engines() -> None:
    assert {"tensor_parallel_size", "gpu_memory_utilization", "swap_space"} <= engine_arguments("vllm")
    assert {"tp_size", "mem_fraction_static", "attention_backend"} <= engine_arguments("sglang")
    assert all(name.isidentifier() for engine in ("vllm", "sglang") for name in engine_arguments(engine))
