"""If these fail, a run's memory is that of another model, or an unknown model stops the plan of all the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_models import CONFIGS, PARAMETERS, VISION_CONFIGS, VISION_PARAMETERS, at

from quintet.config.compose import load_experiment
from quintet.config.model_locations.locations import UnreadableConfigError, is_hub_name
from quintet.config.plan.model_shapes import ModelShape, read_shape
from quintet.config.plan.models import UnknownModel, find_model_shape, find_models


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_published_weights(name: str) -> None:
    assert read_shape(CONFIGS[name]).parameters == PARAMETERS[name]


def test_the_layers_of_a_policy_made_on_the_spot_are_counted_by_hand() -> None:
    """grid-1m: 4 layers of 128, 8 heads of 16 of which 2 have keys, feed-forward 384, 640 tokens, one matrix."""
    layer = (128 * 128 + 128) + 2 * (128 * 32 + 32) + 128 * 128 + 3 * 128 * 384 + 2 * 128
    shape = find_models(load_experiment(None).experiment).of("actor")
    assert shape is not None
    assert shape.parameters == 640 * 128 + 4 * layer + 128


@pytest.mark.parametrize("name", VISION_CONFIGS)
def test_parameters_of_vision_language_models_are_those_of_the_published_weights(name: str) -> None:
    assert read_shape(VISION_CONFIGS[name]).parameters == VISION_PARAMETERS[name]


def test_a_language_model_inside_another_is_found() -> None:
    """Gemma 3's files name neither its heads nor its vocabulary: 3,880,263,168 parameters beside its eyes."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    assert read_shape({"model_type": "gemma3", "text_config": text}).parameters == 3_880_263_168


def test_layers_with_a_recurrence_have_no_keys_and_values() -> None:
    """Of Qwen3.5's layers, every fourth has attention."""
    config = CONFIGS["Llama-3-8B"]
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8
    assert read_shape(config | {"layer_types": kinds}).cache_numbers() * 4 == read_shape(config).cache_numbers()
    assert read_shape(config | {"layer_types": ["full_attention"] * 32}) == read_shape(config)


def test_another_family_is_counted_like_llama_and_marked() -> None:
    shape = read_shape(CONFIGS["Llama-3-8B"] | {"model_type": "novel"})
    assert (shape.parameters, shape.known) == (PARAMETERS["Llama-3-8B"], False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers = 'many' is not a size"),
        ({"vocab_size": True}, "vocab_size = True is not a size"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"intermediate_size": -1}, "intermediate_size = -1 is not a size"),
    ],
)
def test_a_file_that_says_too_little_says_what_is_missing(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnreadableConfigError, match=words):
        read_shape(CONFIGS["Llama-3-8B"] | changes)


def test_a_directory_is_read(tmp_path: Path) -> None:
    shape = find_model_shape(at(tmp_path, "Qwen2.5-0.5B"), {})
    assert isinstance(shape, ModelShape)
    assert shape.parameters == PARAMETERS["Qwen2.5-0.5B"]


def test_overrides_of_the_configuration_count(tmp_path: Path) -> None:
    shape = find_model_shape(at(tmp_path, "Llama-3-8B"), {"num_hidden_layers": 1})
    assert isinstance(shape, ModelShape)
    assert shape.layers == 1


@pytest.mark.parametrize("text", ["{", "[]", "\udcff", '{"model_type": 1}', "[" * 100000])
def test_a_broken_file_leaves_the_model_unknown(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    found = find_model_shape(str(tmp_path), {})
    assert isinstance(found, UnknownModel)
    assert str(tmp_path / "config.json") in found.reason


def test_a_name_of_the_hub_is_looked_up_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot that `main` names, of all that were ever downloaded."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    cache = tmp_path / "hub" / "models--Qwen--Qwen2.5-7B"
    for revision, name in {"aaa": "Qwen2.5-7B", "bbb": "Qwen2.5-0.5B"}.items():
        (cache / "snapshots" / revision).mkdir(parents=True)
        (cache / "snapshots" / revision / "config.json").write_text(json.dumps(CONFIGS[name]))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("aaa")
    shape = find_model_shape("Qwen/Qwen2.5-7B", {})
    assert isinstance(shape, ModelShape)
    assert shape.parameters == PARAMETERS["Qwen2.5-7B"]


def test_a_name_that_was_never_downloaded_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = find_model_shape("Qwen/Qwen2.5-7B", {})
    assert found == UnknownModel(
        "the directory Qwen/Qwen2.5-7B does not exist, and the Hugging Face cache has no config.json of that name",
        "hf download Qwen/Qwen2.5-7B config.json",
    )


@pytest.mark.parametrize(
    ("path", "is_name"),
    [("Qwen/Qwen2.5-7B", True), ("/models/x", False), ("./a/b", False), ("a/b/c", False), ("a", False)],
)
def test_names_of_the_hub_are_told_from_paths(path: str, is_name: bool) -> None:
    assert is_hub_name(path) is is_name


def test_the_cache_holds_what_attention_needs_and_no_more() -> None:
    """Qwen2.5-7B: 2 × 28 layers × 4 heads × 128; over more devices than heads each keeps one; DeepSeek keeps one
    vector of 512 + 64 a layer."""
    shape = read_shape(CONFIGS["Qwen2.5-7B"])
    assert [2 * shape.cache_numbers(tensor) for tensor in (1, 2, 4, 8)] == [57_344, 28_672, 14_336, 14_336]
    assert read_shape(CONFIGS["DeepSeek-V2-Lite"]).cache_numbers(4) == 27 * 576
