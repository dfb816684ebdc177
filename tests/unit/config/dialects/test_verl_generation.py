"""If these fail, verl's runs that only generate sample other responses than verl, or a setting of them is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated

from quintet.cli.configuration import inspect_config
from quintet.config.dialects.dialect import key_files
from quintet.config.dialects.ledger import KeySpec
from quintet.config.plan.run_plan import plan_run
from quintet.errors import ConfigError

R = "actor_rollout_ref.rollout"
MAIN: dict[str, Any] = {"data": {"path": "a.parquet", "output_path": "out/b.parquet"}, "model": {"path": "some/model"}}
SERVER: dict[str, Any] = {
    "data": {"train_files": ["a.parquet", "b.parquet"], "output_path": "c.parquet"},
    "actor_rollout_ref": {"model": {"path": "some/model"}},
}
Row = tuple[str, Any, Any, str, Any]
ENGINE = "rollout.engine_options"
ROWS: list[Row] = [
    ("trainer.nnodes", 2, 0, "placement.nodes", 2),
    ("trainer.n_gpus_per_node", 4, 0, "placement.devices_per_node", 4),
    ("data.path", "other.parquet", None, "data.train_files", ("other.parquet",)),
    ("data.prompt_key", "question", 1, "data.prompt_key", "question"),
    ("data.n_samples", 8, 0, "generation.samples", 8),
    ("data.output_path", "out/other.parquet", 1, "generation.output_path", "out/other.parquet"),
    ("data.batch_size", 16, 0, "generation.batch_size", 16),
    ("data.trust_remote_code", True, 1, "policy.trust_tokenizer_code", True),
    ("model.path", "other/model", None, "policy.path", "other/model"),
    ("model.external_lib", "plug.ins", 1, "external_libs", ("plug.ins",)),
    ("model.trust_remote_code", True, 1, "policy.trust_remote_code", True),
    ("rollout.name", "sglang", "other", "rollout.engine", "sglang"),
    ("rollout.temperature", 0.5, -1, "rollout.temperature", 0.5),
    ("rollout.top_k", -1, -2, "rollout.top_k", 0),
    ("rollout.top_p", 0.9, 0, "rollout.top_p", 0.9),
    ("rollout.do_sample", False, 1, "rollout.do_sample", False),
    ("rollout.prompt_length", 1024, 0, "rollout.max_prompt_tokens", 1024),
    ("rollout.response_length", 2048, 0, "rollout.max_response_tokens", 2048),
    ("rollout.dtype", "half", "int8", f"{ENGINE}.dtype", "float16"),
    ("rollout.gpu_memory_utilization", 0.8, 0, f"{ENGINE}.memory_share", 0.8),
    ("rollout.ignore_eos", True, 1, "rollout.ignore_end", True),
    ("rollout.enforce_eager", False, 1, f"{ENGINE}.eager", False),
    ("rollout.tensor_model_parallel_size", 2, 0, f"{ENGINE}.tensor_parallel", 2),
    ("rollout.max_num_batched_tokens", 4096, 0, f"{ENGINE}.max_batched_tokens", 4096),
    ("rollout.max_model_len", 1500, 0, f"{ENGINE}.max_model_tokens", 1500),
    ("rollout.max_num_seqs", 64, 0, "rollout.max_concurrent", 64),
    ("rollout.disable_log_stats", False, 1, f"{ENGINE}.log_statistics", True),
    ("rollout.enable_chunked_prefill", False, 1, f"{ENGINE}.chunked_prefill", False),
]
GREEDY = {"data.n_samples": 1}
BESIDE = {"rollout.do_sample": GREEDY}
"""Values of other keys with which a key is valid."""
(FILE,) = key_files("verl", ["verl_generation"])
WITHOUT_EFFECT = [row for row in FILE.load() if not row.native and row.requires is None]
WAITING = [row for row in FILE.load() if row.state == "pending"]


@pytest.mark.proves("verl", *(row[0] for row in ROWS))
@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_key_of_main_generation_reaches_the_run(tmp_path: Path, row: Row) -> None:
    key, value, illegal, native, expected = row
    found = converted(tmp_path, "verl", changed(MAIN, {**BESIDE.get(key, {}), key: value}))
    assert natively(found, native) == expected
    assert key in found.composed.provenance.get(native, "")
    assert translated(found, "verl").lost == {}
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "verl", changed(MAIN, {key: illegal}))
    assert key in str(error.value)


def test_each_honoured_key_has_a_row_here() -> None:
    others = {row.key for row in (*WITHOUT_EFFECT, *WAITING)}
    assert {row.key for row in FILE.load()} - others == {row[0] for row in ROWS}


def other_value(row: KeySpec) -> Any:
    candidates = (True, False, 7, 0.25, "other", {"some": 1}, *row.value_type.choices)
    legal = [value for value in candidates if row.value_type.accepts(value) and value not in row.noop]
    return next((value for value in legal if value != row.default or type(value) is not type(row.default)), row.default)


@pytest.mark.proves("verl", *(row.key for row in WITHOUT_EFFECT))
def test_keys_without_effect_on_generation_say_so_and_change_nothing(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(MAIN, {row.key: other_value(row) for row in WITHOUT_EFFECT}))
    assert found.composed.experiment == converted(tmp_path, "verl", MAIN).composed.experiment
    assert all("has no effect here" in row.effect.lower() for row in WITHOUT_EFFECT)


def test_a_key_of_main_generation_that_waits_names_its_capability(tmp_path: Path) -> None:
    assert {row.key for row in WAITING} == {
        *("trainer.device", "data.apply_chat_template_kwargs", "rollout.data_parallel_size"),
        *("rollout.use_fire_sampling", "ray_kwargs.timeline_json_file"),
    }
    values = {row.key: "npu" if row.key == "trainer.device" else other_value(row) for row in WAITING}
    found = converted(tmp_path, "verl", changed(MAIN, values))
    named = {problem.key: problem.message for problem in found.unsupported}
    for row in WAITING:
        assert str(row.requires) in named[row.key]


def test_the_defaults_of_main_generation_are_those_of_its_file(tmp_path: Path) -> None:
    """`generation.yaml` at 0.6.1: five samples at temperature 1 of the 50 likeliest tokens within 0.7, 128 prompts
    together, 1536 and 512 tokens; the tokenizer cuts the end of a longer prompt."""
    run = converted(tmp_path, "verl", MAIN).composed.experiment
    assert run.generation is not None
    assert run.data is not None
    rollout = run.rollout
    assert (run.generation.samples, run.generation.batch_size, run.generation.response_key) == (5, 128, "responses")
    assert (rollout.temperature, rollout.top_k, rollout.top_p, rollout.do_sample) == (1.0, 50, 0.7, True)
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens, run.data.truncation) == (1536, 512, "right")
    assert (run.name, run.env.name, run.placement.devices_per_node) == ("generate-b", "prompts", 8)


def test_a_server_samples_as_its_engines_are_configured(tmp_path: Path) -> None:
    """Its requests have temperature and top_p, and vLLM's server gets top_k by `override_generation_config`."""
    values = {"n": 4, "temperature": 0.8, "top_k": 20, "top_p": 0.95, "prompt_length": 100, "response_length": 200}
    changes = {f"{R}.{key}": value for key, value in values.items()}
    changes |= {f"{R}.tensor_model_parallel_size": 4, "trainer.nnodes": 2, "data.prompt_key": "question"}
    run = converted(tmp_path, "verl", changed(SERVER, changes)).composed.experiment
    assert run.generation is not None
    assert run.data is not None
    rollout = run.rollout
    assert (run.generation.samples, run.generation.output_path) == (4, "c.parquet")
    assert (rollout.temperature, rollout.top_k, rollout.top_p) == (0.8, 20, 0.95)
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens) == (100, 200)
    assert (run.data.train_files, run.data.prompt_key) == (("a.parquet", "b.parquet"), "question")
    assert (rollout.engine_options.tensor_parallel, run.placement.nodes, run.placement.devices_per_node) == (4, 2, 8)
    assert run.name == "generate-c"


def test_a_server_takes_all_rows_and_says_which_settings_are_of_training(tmp_path: Path) -> None:
    changes = {"data.filter_overlong_prompts": True, "data.train_batch_size": 100, "trainer.experiment_name": "mine"}
    found = converted(tmp_path, "verl", changed(SERVER, changes))
    run, plain = found.composed.experiment, converted(tmp_path, "verl", SERVER).composed.experiment
    assert run.model_copy(update={"name": plain.name, "output_dir": plain.output_dir}) == plain
    assert run.name == "mine"
    for key in ("data.filter_overlong_prompts", "data.train_batch_size"):
        assert any(key in remark and "only generates" in remark for remark in found.composed.remarks)


@pytest.mark.parametrize(
    ("tree", "temperature", "samples"),
    [(MAIN, "rollout.temperature", "data.n_samples"), (SERVER, f"{R}.temperature", f"{R}.n")],
    ids=["main", "server"],
)
def test_a_temperature_of_0_is_greedy_and_has_one_response(
    tmp_path: Path, tree: dict[str, Any], temperature: str, samples: str
) -> None:
    run = converted(tmp_path, "verl", changed(tree, {temperature: 0.0, samples: 1})).composed.experiment
    assert (run.rollout.do_sample, run.rollout.temperature) == (False, 1.0)
    with pytest.raises(ConfigError, match=f"{samples} = 2"):
        converted(tmp_path, "verl", changed(tree, {temperature: 0.0, samples: 2}))


def test_gpus_that_engines_cannot_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must divide the 8 GPUs"):
        converted(tmp_path, "verl", changed(MAIN, {"rollout.tensor_model_parallel_size": 3}))


@pytest.mark.parametrize(
    ("line", "engines", "kind"),
    [
        ("verl.trainer.main_generation data.path=x.parquet rollout.name=vllm", 8, "generation of responses"),
        (
            "verl.trainer.main_generation_server data.train_files=x.parquet +data.output_path=y.parquet "
            f"{R}.tensor_model_parallel_size=2 actor_rollout_ref.model.path=m {R}.name=vllm",
            4,
            "generation of responses",
        ),
    ],
)
def test_scripts_that_generate_are_planned(tmp_path: Path, line: str, engines: int, kind: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m {line}\n")
    plan = plan_run(inspect_config(str(script), [], None, "refuse").composed)
    (placed,) = plan.placement.components
    assert (placed.name, placed.copies, plan.to_json()["run"]["kind"]) == ("rollout", engines, kind)


def test_several_files_of_prompts_are_not_written_as_generation_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one file of prompts, and this run has 2"):
        translated(converted(tmp_path, "verl", SERVER), "verl")
