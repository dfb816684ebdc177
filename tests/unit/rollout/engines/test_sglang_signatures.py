"""If these fail, requests to SGLang do not match the published package, and a run fails at its start."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.config.native.rollout import EngineConfig
from quintet.errors import ConfigError, MachineError
from quintet.policies.model_loading import load_model
from quintet.records import Request
from quintet.rollout.engines.engine import EngineSetup
from quintet.rollout.engines.sglang import options as sglang_options
from quintet.rollout.engines.sglang.options import OPTIONS, RESERVED, Release, option_arguments, server_arguments
from quintet.rollout.engines.sglang.protocol import CONTROLS, PendingRequest, generate_body, score_body

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "sglang_signatures.json").read_text())
RELEASE = Release(f"SGLang {PUBLISHED['version']}", frozenset(PUBLISHED["server_args"]))
EVERYTHING = Request(
    id=1,
    prompt=(1, 2, 3),
    max_tokens=9,
    seed=(1 << 64) - 1,
    temperature=0.0,
    top_k=4,
    top_p=0.5,
    min_p=0.1,
    repetition_penalty=1.1,
    min_tokens=2,
    stop_token_ids=(7,),
    stop_strings=("</answer>",),
)


def test_the_tested_release_is_the_documented_one() -> None:
    from quintet.cli.engine_checks import SGLANG

    assert PUBLISHED["version"] == "0.5.23"
    assert PUBLISHED["version"] in SGLANG


@pytest.mark.parametrize(
    "body", [generate_body(PendingRequest(EVERYTHING, 0), 64), score_body(PendingRequest(EVERYTHING, 0))]
)
def test_generate_requests_match_the_signatures(body: dict[str, Any]) -> None:
    """Over HTTP, which rejects unknown fields, and as arguments of the in-process engine."""
    field_names = {*body, "rid", "image_data"}
    assert field_names <= set(PUBLISHED["generate_json"])
    assert field_names <= set(PUBLISHED["engine"]["async_generate"])
    assert field_names <= set(PUBLISHED["records"]["GenerateReqInput"])
    assert set(body["sampling_params"]) <= set(PUBLISHED["sampling_json"]) & set(PUBLISHED["sampling_params"])


def test_sampling_parameters_are_valid_for_sglang() -> None:
    sampling_params = generate_body(PendingRequest(EVERYTHING, 0), 8)["sampling_params"]
    assert 0 <= sampling_params["sampling_seed"] < 1 << 63
    assert sampling_params["max_new_tokens"] == 5
    assert sampling_params["top_k"] == 4
    plain = generate_body(PendingRequest(dataclasses.replace(EVERYTHING, top_k=0, stop_token_ids=()), 0), 64)[
        "sampling_params"
    ]
    assert plain["top_k"] == -1
    assert plain["ignore_eos"] is True
    assert "stop_token_ids" not in plain


def test_parsed_response_fields_exist() -> None:
    read = {"finish_reason", "prompt_tokens", "output_token_logprobs", "input_token_logprobs", "weight_versions"}
    assert read <= set(PUBLISHED["meta_info_json"])


@pytest.mark.parametrize("name", CONTROLS)
def test_control_requests_have_a_route_a_method_and_a_record(name: str) -> None:
    record, fields = CONTROLS[name]
    assert "POST" in PUBLISHED["routes"][f"/{name}"]
    assert name in PUBLISHED["tokenizer_manager"]
    if name == "abort_request":
        assert set(fields) <= set(PUBLISHED["tokenizer_manager"][name])
    else:
        assert bool(PUBLISHED["tokenizer_manager"][name][:1] == ["obj"]) == (record is not None)
    if record is not None:
        assert set(fields) <= set(PUBLISHED["records"][record])


@pytest.mark.parametrize(
    ("verb", "route"), [("POST", "/generate"), ("GET", "/health"), ("GET", "/model_info"), ("GET", "/server_info")]
)
def test_requested_routes_exist(verb: str, route: str) -> None:
    assert verb in PUBLISHED["routes"][route]


def test_in_process_functions_exist() -> None:
    assert PUBLISHED["engine"]["__init__"] == ["**kwargs"]
    assert {"get_all_child_pids", "shutdown"} <= set(PUBLISHED["engine"])
    assert "custom_sigquit_handler" in PUBLISHED["server_args"]
    assert PUBLISHED["launch_server"][0] == "server_args"
    assert "named_tensors" in PUBLISHED["tensor_bucket"]["__init__"]
    assert {"get_flattened_tensor", "get_metadata"} <= set(PUBLISHED["tensor_bucket"])
    assert PUBLISHED["serializer"]["serialize"][0] == "obj"


@pytest.fixture
def setup(policy_directory: Path) -> EngineSetup:
    return EngineSetup(
        directory=policy_directory,
        model=load_model(policy_directory),
        dtype=torch.bfloat16,
        max_num_seqs=12,
        max_model_len=100,
        detokenize=str,
        options=EngineConfig(arguments={}),
        seed=3,
    )


def test_required_arguments_exist(setup: EngineSetup) -> None:
    actual = server_arguments(setup, RELEASE)
    assert actual == {
        "model_path": str(setup.directory),
        "trust_remote_code": False,
        "dtype": "bfloat16",
        "context_length": 108,
        "max_running_requests": 12,
        "random_seed": 3,
        "weight_version": "0",
        "disable_cuda_graph": True,
        "skip_tokenizer_init": True,
        "log_level": "warning",
    }
    assert RESERVED.keys() | {"host", "port", "api_key"} <= RELEASE.arguments
    with pytest.raises(MachineError, match="has no argument 'weight_version'"):
        server_arguments(setup, Release("SGLang 0.1", RELEASE.arguments - {"weight_version"}))


def test_context_length_is_at_most_that_of_the_model(setup: EngineSetup) -> None:
    assert server_arguments(dataclasses.replace(setup, max_model_len=510), RELEASE)["context_length"] == 512


CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("attention_backend", "fa3", {"attention_backend": "fa3"}),
    ("block_size", 16, {"page_size": 16}),
    ("chunked_prefill", False, {"chunked_prefill_size": -1}),
    ("chunked_prefill", True, {}),
    ("cuda_graph_max_batch", 64, {"cuda_graph_max_bs_decode": 64}),
    ("deterministic", True, {"enable_deterministic_inference": True}),
    ("detokenize", True, {"skip_tokenizer_init": False}),
    ("eager", False, {"disable_cuda_graph": False}),
    ("image_cache", False, {"mm_preprocess_cache_size_mb": 0}),
    ("load_format", "dummy", {"load_format": "dummy"}),
    ("log_every_steps", 50, {"decode_log_interval": 50}),
    ("log_statistics", True, {"log_level": "info"}),
    ("max_batched_tokens", 4096, {"chunked_prefill_size": 4096, "max_prefill_tokens": 4096}),
    ("memory_share", 0.5, {"mem_fraction_static": 0.5}),
    ("offload", True, {"enable_memory_saver": True, "enable_weights_cpu_backup": True}),
    ("pipeline_parallel", 2, {"pp_size": 2}),
    ("sleep_between_steps", True, {"enable_memory_saver": True}),
    ("tensor_parallel", 4, {"tp_size": 4}),
    ("torch_compile", True, {"enable_torch_compile": True}),
    ("torch_compile_max_batch", 8, {"torch_compile_max_bs": 8}),
    ("arguments", {"schedule_policy": "lpm"}, {"schedule_policy": "lpm"}),
    ("dtype", "bfloat16", {}),
    ("max_model_tokens", 64, {}),
]
DEFAULT_ARGUMENTS = option_arguments(EngineConfig(arguments={}), RELEASE)


@pytest.mark.parametrize(("option", "value", "expected"), CASES)
def test_each_option_becomes_its_argument(option: str, value: Any, expected: dict[str, Any]) -> None:
    actual = option_arguments(EngineConfig.model_validate({option: value}), RELEASE)
    assert actual == DEFAULT_ARGUMENTS | expected
    assert actual.keys() <= RELEASE.arguments


def test_every_option_is_passed_handled_or_rejected() -> None:
    known = OPTIONS.keys() | sglang_options.NOT_PASSED
    assert {option for option, _, _ in CASES} >= OPTIONS.keys()
    assert EngineConfig.model_fields.keys() - known == {"executor", "separate_process", "swap_space_gib"}
    for option, value in (("executor", "ray"), ("separate_process", True), ("swap_space_gib", 4)):
        with pytest.raises(ConfigError, match=f"{option} = .*has no such option"):
            option_arguments(EngineConfig.model_validate({option: value}), RELEASE)


@pytest.mark.parametrize(("option", "value", "theirs"), [(o, v, e) for o, v, e in CASES if e and o != "arguments"])
def test_an_option_missing_in_a_release_is_a_config_error(option: str, value: Any, theirs: dict[str, Any]) -> None:
    without = Release("SGLang 0.9", RELEASE.arguments - theirs.keys() - {"cuda_graph_max_bs"})
    with pytest.raises(ConfigError, match=f"engine_options.{option} = .*SGLang 0.9 has no such option") as error:
        option_arguments(EngineConfig.model_validate({option: value}), without)
    assert error.value.key == f"rollout.engine_options.{option}"


def test_older_argument_names_are_used_for_older_releases() -> None:
    older = Release("SGLang 0.5.3", (RELEASE.arguments | {"cuda_graph_max_bs"}) - {"cuda_graph_max_bs_decode"})
    assert option_arguments(EngineConfig(cuda_graph_max_batch=8, arguments={}), older)["cuda_graph_max_bs"] == 8


def test_chunked_prefill_is_off_despite_a_chunk_size() -> None:
    actual = option_arguments(EngineConfig(chunked_prefill=False, max_batched_tokens=2048, arguments={}), RELEASE)
    assert (actual["chunked_prefill_size"], actual["max_prefill_tokens"]) == (-1, 2048)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shedule_policy", "did you mean 'schedule_policy'?"),
        ("model_path", "set policy.path"),
        ("api_key", "remove rollout.engine_options.arguments.api_key"),
    ],
)
def test_extra_arguments_are_checked(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"arguments.{name}") as error:
        option_arguments(EngineConfig(arguments={name: "x"}), RELEASE)
    assert message in str(error.value)


def test_fields_of_older_releases_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields defined in the class itself."""
    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    (package / "server_args.py").write_text(
        "class ServerArgs:\n    model_path: str\n    tp_size: int = 1\nclass Other:\n    not_this: int\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert sglang_options.installed_release().arguments == {"model_path", "tp_size"}
    (package / "server_args.py").write_text("ServerArgs = object\n")
    with pytest.raises(MachineError, match="no known ServerArgs"):
        sglang_options.installed_release()


@pytest.mark.skipif("SGLANG_WHEEL" not in os.environ, reason="SGLANG_WHEEL names no wheel")
def test_stored_signatures_match_the_wheel() -> None:
    path = HERE.parents[3] / "scripts" / "make_sglang_signatures.py"
    spec = importlib.util.spec_from_file_location("make_sglang_signatures", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.inspect(made.Wheel(Path(os.environ["SGLANG_WHEEL"]))) == PUBLISHED
