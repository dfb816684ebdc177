"""If these fail, `quintet serve` lets in whom it shouldn't, or starts with other settings than told."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest

from quintet.cli import serve
from quintet.cli.options import ServeOptions
from quintet.cli.serve import run
from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.errors import ConfigError, MachineError, UserError
from quintet.rollout.engines.hf.engine import MAX_SERVING_SLOWDOWN, HfEngine
from quintet.runtime.server_process import server_interpreter
from quintet.runtime.serving.build import build_request_handler

PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QUINTET_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be served, and how."""
    seen: list[Any] = []
    monkeypatch.setattr(serve, "_serve", lambda *value: seen.append(value) or 0)
    return seen


@pytest.mark.parametrize(
    ("overrides", "asked", "message"),
    [
        ([], ServeOptions(host="0.0.0.0"), "there is no token"),
        ([], ServeOptions(host="box.example"), "there is no token"),
        ([], ServeOptions(engine="vlm"), "vllm"),
        ([], ServeOptions(dtype="int3"), "policy.dtype"),
        (["rollout.engin=hf"], ServeOptions(), "rollout.engine"),
    ],
)
def test_what_cant_be_served_is_told(
    policy_directory: Path, overrides: list[str], asked: ServeOptions, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        run(str(policy_directory), overrides, asked)
    assert message in str(refused.value)


@pytest.mark.parametrize("given", ["mine", "mine/", "runs/../mine"])
def test_a_model_behind_a_link_has_the_name_that_was_given(
    policy_directory: Path, tmp_path: Path, started: list[Any], given: str
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "mine").symlink_to(policy_directory)
    run(given, [], ServeOptions())
    assert started[0][2] == "mine"


def test_a_server_has_an_interpreter_that_answers_and_a_stopped_one_frees_its_objects() -> None:
    """Else triton prints thirty lines about leaks at each end of `quintet serve`."""
    thresholds, switch_seconds = gc.get_threshold(), sys.getswitchinterval()
    with server_interpreter():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > thresholds[0]
        assert sys.getswitchinterval() < switch_seconds / 20
    assert gc.get_freeze_count() == 0
    assert (gc.get_threshold(), sys.getswitchinterval()) == (thresholds, switch_seconds)


def test_what_is_no_model_is_told() -> None:
    with pytest.raises(MachineError, match="no model at nowhere"):
        run("nowhere", [], ServeOptions())


def test_adapters_have_to_be_merged_before_they_are_served(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/adapter_config.json").write_text("{}")
    with pytest.raises(MachineError, match=r"mine has adapters, not a model\n.*quintet export mine TARGET"):
        run("mine", [], ServeOptions())


def test_the_options_become_the_configuration(
    policy_directory: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ServeOptions(dtype="bfloat16", max_concurrent=7, context=99, trust_remote_code=True, host="0.0.0.0", port=0)
    monkeypatch.setenv("QUINTET_TOKEN", "sesame")
    assert run(str(policy_directory), ["seed=4", "rollout.engine_options.memory_share=0.3"], asked) == 0
    composed, policy, name, context, address = started[0]
    config = composed.experiment
    assert (policy, name, context) == (policy_directory, policy_directory.name, 99)
    assert (address.host, address.port, address.token) == ("0.0.0.0", 0, "sesame")
    assert (config.policy.dtype, config.rollout.max_concurrent, config.seed) == ("bfloat16", 7, 4)
    assert (config.rollout.engine, config.rollout.engine_options.memory_share) == ("hf", 0.3)
    assert "will be executed" in capsys.readouterr().err


def test_a_run_is_served_as_it_was_trained(policy_directory: Path, started: list[Any], tmp_path: Path) -> None:
    import shutil

    from saved_checkpoints import save_checkpoint

    run_directory = tmp_path / "runs" / "r"
    save_checkpoint(
        run_directory / "checkpoints", 7, {}, lambda there: shutil.copytree(policy_directory, there / "hf"), keep=1
    )
    (run_directory / "config.yaml").write_text("name: r\nrollout: {max_concurrent: 5}\npolicy: {dtype: bfloat16}\n")
    run("runs/r", [], ServeOptions(name="best"))
    composed, policy, name, _, address = started[0]
    assert (policy.parent.name, name, address.token) == ("global_step_7", "best", None)
    assert composed.experiment.rollout.max_concurrent == 5
    assert composed.experiment.policy.dtype == "bfloat16"
    assert composed.experiment.rollout.engine_options.memory_share is None


def build_handler(policy: Path, context: int | None, *overrides: str) -> Any:
    served_overrides = ["policy.preset=null", f"policy.path={policy}", "warm_start=null", *overrides]
    composed: ComposedConfig = load_experiment(None, served_overrides)
    return build_request_handler(composed.experiment, policy, name="m", context=context)


def test_the_handler_has_the_requested_context(policy_directory: Path) -> None:
    for expected, given in ((None, 512), (64, 64)):
        made = build_handler(policy_directory, expected, "rollout.max_concurrent=3")
        assert (made.handler.engine.max_model_len, made.max_concurrent_requests, made.dtype) == (given, 3, "float32")
        made.handler.close()
    with pytest.raises(UserError, match="supports 512 tokens"):
        build_handler(policy_directory, 513)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_server_bounds_its_steps_and_is_batch_invariant_on_request(
    policy_directory: Path,
    deterministic: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else a long prompt stops all streams, or a few requests take the time of sixteen."""
    arguments, plain = [], HfEngine.__init__

    def recording(engine: HfEngine, *positional: Any, **named: Any) -> None:
        arguments.append(named)
        plain(engine, *positional, **named)

    monkeypatch.setattr(HfEngine, "__init__", recording)
    option = f"rollout.engine_options.deterministic={str(deterministic).lower()}"
    served = build_handler(policy_directory, 64, option)
    assert arguments[-1]["max_pass_slowdown"] == MAX_SERVING_SLOWDOWN
    assert arguments[-1]["batch_invariant"] is deterministic
    serve._print_address(served, "m", load_experiment(None, [option]).experiment, "http://127.0.0.1:1")
    assert ("batch-invariant" in capsys.readouterr().err) is deterministic
    served.handler.close()


def test_the_page_names_every_option_and_field() -> None:
    from typer.main import get_command

    from quintet.cli.main import app
    from quintet.runtime.serving.request_schema import ChatBody, CompletionBody

    commands = get_command(app).commands
    for command in ("serve", "eval"):
        for parameter in commands[command].params:
            option = next((name for name in parameter.opts if name.startswith("--")), None)
            if option is not None and (command == "serve" or option.startswith("--endpoint")):
                assert f"`{option}" in PAGE, option
    for field in {*ChatBody.model_fields, *CompletionBody.model_fields} - {"messages", "prompt"}:
        assert f"`{field}`" in PAGE, field
