"""If these fail, a hint about an engine leads nowhere."""

from __future__ import annotations

import copy
import json
import re
import shutil
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hint_cases import HintCase, case, name_of, sites_without_case
from test_restarting_engine import Mortal
from test_weight_verification import PROMPTS, Copy

from quintet import hardware
from quintet.cli import check
from quintet.config.native.rollout import EngineConfig
from quintet.errors import MachineError
from quintet.policies.model_loading import load_model
from quintet.records import Request
from quintet.rollout.engines.engine import EngineError, EngineSetup
from quintet.rollout.engines.hf import cache_memory
from quintet.rollout.engines.hf.engine import HfEngine, build_hf_engine
from quintet.rollout.engines.hf.engine_check import check_engine
from quintet.rollout.engines.openai_endpoint import EndpointSettings
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.rollout.engines.sglang import engine as sglang_engine
from quintet.rollout.engines.sglang import local, weight_sync
from quintet.rollout.engines.sglang import options as sglang_options
from quintet.rollout.engines.sglang.protocol import check_request
from quintet.rollout.engines.sglang.server import ServerAddress
from quintet.rollout.engines.vllm import engine as vllm_engine
from quintet.rollout.engines.vllm import llm_engine
from quintet.rollout.engines.vllm import options as vllm_options
from quintet.rollout.engines.weight_source import TensorWeights
from quintet.rollout.engines.weight_verification import check_weights

REQUIRED = {"model_path", "trust_remote_code", "dtype", "context_length", "max_running_requests", "random_seed"}
NAMES = frozenset({*REQUIRED, "weight_version", "skip_tokenizer_init", "disable_cuda_graph", "log_level"})
SGLANG = sglang_options.Release("SGLang 0.5.23", NAMES | {"mem_fraction_static"})
VLLM = vllm_options.Release("0.32.0", frozenset({"block_size", "max_num_seqs"}), cpu=False)


def setup(dtype: torch.dtype = torch.float32, **options: Any) -> EngineSetup:
    return EngineSetup(
        Path("model"), load_model("model"), dtype, 8, 256, detokenize=str, options=EngineConfig(**options), seed=5
    )


def computed_in(dtype: torch.dtype) -> None:
    build_hf_engine(setup(dtype)).close()


def compared(setting: tuple[str, str]) -> None:
    """The check of an engine that computes another model, or whose model raises an error."""
    engine, problem = setting

    def build(network: Any, length: int) -> HfEngine:
        if problem == "raises":
            raise RuntimeError
        if problem == "differs":
            network = copy.deepcopy(network)
            torch.nn.init.normal_(network.lm_head.weight)
        return HfEngine(network, max_num_seqs=3, max_model_len=length)

    if engine == "hf":
        check_engine(load_model("model"), build)


def within(share_and_tokens: tuple[float, int]) -> None:
    """A share of a machine that has just enough memory for 64 tokens."""
    share, tokens = share_and_tokens
    network = load_model("model")
    weights = sum(parameter.nbytes for parameter in network.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "memory_bytes", lambda: weights + 5 * 4096)
        cache_memory.max_cache_blocks(network, tokens, 8, share)


def asked(url: str) -> None:
    EndpointSettings(url, "model").check()


def served(deaths: int) -> None:
    """A step of an engine that dies so many times."""
    scripted: dict[str, list[BaseException | None]] = {"step": [EngineError("no memory")] * deaths}
    engine: Any = RestartingEngine(lambda: Mortal(scripted, []), TensorWeights([]), max_restarts=1)  # type: ignore[arg-type,return-value]
    engine.add_request(Request(id=0, prompt=(1,), max_tokens=1, seed=0))
    for _ in range(2 * deaths + 1):  # a step returns what the last one has lost
        if engine.busy:
            engine.step()
        else:
            engine.add_request(Request(id=1, prompt=(1,), max_tokens=1, seed=0))


def python(answer: str) -> str:
    """An interpreter of an environment, of which it says that."""
    path = Path(f"python{len(list(Path().glob('python*')))}")
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(stat.S_IRWXU)
    return str(path.resolve())


def installed(environment: str) -> None:
    """SGLang of an environment: its release, none, one of unknown layout, or an interpreter that is missing."""
    if environment == "missing":
        sglang_options.installed_release("no/python")
        return
    package = Path("sglang", environment)
    (package / "srt").mkdir(parents=True, exist_ok=True)
    fields = "    model_path: str\n" if environment == "release" else "    pass\n"
    (package / "srt/server_args.py").write_text(f"class ServerArgs:\n{fields}")
    directory = None if environment == "none" else str(package.resolve())
    sglang_options.installed_release(python(json.dumps([directory, "0.5.23"])))


def with_arguments(arguments: frozenset[str]) -> None:
    sglang_options.server_arguments(setup(), sglang_options.Release("SGLang", arguments))


def sglang_with(options: Mapping[str, Any]) -> None:
    sglang_options.option_arguments(EngineConfig(**options), SGLANG)


def running(setting: tuple[float, float]) -> None:
    """A server that runs with a share of memory, and the option."""
    share, option = setting
    options = EngineConfig(server_url="http://127.0.0.1:1", memory_share=option)
    if error := sglang_options.find_mismatch(options, {"mem_fraction_static": share}, SGLANG):
        raise error


def elsewhere(options: Mapping[str, Any]) -> None:
    """A server on another machine."""
    info = {"model_path": "x", "skip_tokenizer_init": True, "disable_cuda_graph": True}
    address: Any = SimpleNamespace(is_local=False, url="http://box:1", request=lambda _: info)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_engine, "find_mismatch", lambda *_: None)
        sglang_engine._server_info(address, setup(server_url="http://box:1", **options))


def started_in_a_thread(engine: str) -> None:
    """SGLang in this process, if that is asked for, from another thread."""
    errors: list[Exception] = []

    def start() -> None:
        try:
            local.InProcessConnection({})
        except MachineError as error:
            errors.append(error)

    if engine == "sglang":
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        raise errors[0]


def requested(setting: tuple[bool, Mapping[str, Any]]) -> None:
    has_tokenizer, options = setting
    request = Request(id=0, prompt=(1,), max_tokens=4, seed=0, **options)
    check_request(request, 99, has_tokenizer=has_tokenizer)


def addressed(url: str) -> None:
    ServerAddress(url, None, None)


def stored(directory: str) -> None:
    """Weights of a MiB in a directory on a small or a large disk."""
    sizes = {"small": 0, "large": 1 << 30}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=sizes[folder.parent.name]))
        weight_sync._check_space(Path(directory, "weights"), 1 << 20)


def warmed_up(engine: str) -> None:
    """The first token of an engine that does not support the model."""

    def fail(_: object = None) -> None:
        raise EngineError("no kernel")

    if engine == "vllm":
        stand_in: Any = SimpleNamespace(add_request=fail, step=fail, reset_prefix_cache=fail)
        vllm_engine._warm_up(stand_in, setup())


def accepted(concurrent: int) -> None:
    """vLLM with so many requests, of which it accepts 100."""

    def create(_: object) -> None:
        if concurrent > 100:
            raise ValueError("max_num_seqs is too large")

    engine: Any = object.__new__(llm_engine.LlmEngine)
    engine._engine, engine._separate_process = None, True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_engine.LlmEngine, "_create_engine", create)
        engine._start()


def beside_a_learner(separate_process: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        if not separate_process:
            llm_engine._check_exclusive()


def vllm_with(options: Mapping[str, Any]) -> None:
    changed = EngineConfig(**options)
    vllm_options._option_arguments(changed, VLLM)
    vllm_options._extra_arguments(changed.arguments, VLLM)


def verified(changes: Mapping[str, Any]) -> None:
    """An engine that fails, or whose log-probs differ."""
    network = load_model("model")
    check_weights(Copy(network, **changes), network, PROMPTS, same_dtype=True)  # type: ignore[arg-type]


class Readable(Copy):
    """An engine whose weights are zero."""

    def weights(self) -> Any:
        return ((name, torch.zeros_like(weight)) for name, weight in self.model.named_parameters())


def differing(directory: str | None) -> None:
    """Weights that differ; the hint names a file with all differences if there is a directory."""
    network = load_model("model")
    try:
        check_weights(Readable(network), network, PROMPTS, same_dtype=True, directory=directory and Path(directory))  # type: ignore[arg-type]
    except MachineError as error:
        if directory is None:
            raise
        (file,) = re.findall(r"see (\S+)", str(error.hint))
        assert json.loads(Path(file).read_text())


OPTIONS = "rollout.engine_options"
LONG = {"repetition_penalty": 1.2, "temperature": 0.5}
CASES = [
    # hf
    case(computed_in, torch.float16, f"set {OPTIONS}.dtype=float32, or bfloat16", torch.float32, torch.bfloat16),
    case(compared, ("hf", "raises"), "set rollout.engine=vllm, or use another model", ("vllm", "raises"), ("hf", "")),
    case(compared, ("hf", "differs"), "set rollout.engine=vllm, or use another model", ("vllm", "differs"), ("hf", "")),
    case(within, (0.5, 64), f"at least: {OPTIONS}.memory_share=1, or shorten rollout.max_prompt_tokens + ", (1.0, 64)),
    case(within, (1.0, 640), "shorten rollout.max_prompt_tokens + rollout.max_response_tokens", (1.0, 64)),
    # endpoints and restarts
    case(asked, "127.0.0.1:8000", "use http://…/v1 or https://…/v1", "http://127.0.0.1:8000/v1", "https://a.b/v1"),
    case(
        served,
        2,
        "see the engine's output above; if it ran out of memory, lower rollout.max_concurrent or rollout.engine",
        0,
    ),
    # SGLang
    case(installed, "missing", "set it to bin/python of an environment with SGLang", "release"),
    case(installed, "none", "install it in a separate environment (docs/sglang.md) and set ", "release"),
    case(installed, "unknown", "install a supported release: pip install sglang", "release"),
    case(with_arguments, NAMES - {"dtype"}, "install a supported release: pip install sglang==0.5.23", NAMES),
    case(sglang_with, {"swap_space_gib": 4}, f"remove {OPTIONS}.swap_space_gib, or use another engine", {}),
    case(sglang_with, {"arguments": {"dtype": "half"}}, f"set {OPTIONS}.dtype instead", {"dtype": "float16"}),
    case(sglang_with, {"arguments": {"api_key": "x"}}, f"remove {OPTIONS}.arguments.api_key", {}),
    case(
        sglang_with,
        {"arguments": {"log_leve": "info"}},
        "did you mean 'log_level'?",
        {"arguments": {"log_level": "info"}},
    ),
    case(sglang_with, {"arguments": {"zzzzz": 1}}, f"remove {OPTIONS}.arguments.zzzzz", {}),
    case(
        running,
        (0.8, 0.5),
        f"restart the server with --mem-fraction-static 0.5, or set {OPTIONS}.memory_share to the server's value",
        (0.5, 0.5),
        (0.8, 0.8),
    ),
    case(
        elsewhere,
        {},
        f"set {OPTIONS}.server_weights_dir to a directory that has the same path on this machine and on the server",
        {"server_weights_dir": "/shared"},
    ),
    case(started_in_a_thread, "sglang", "use rollout.engine=sglang-server", "sglang-server"),
    case(requested, (False, {"min_tokens": 2}), f"set {OPTIONS}.detokenize=true", (True, {"min_tokens": 2})),
    case(
        requested,
        (True, LONG),
        "set rollout.temperature=1, remove the penalties, or use another engine",
        (True, {**LONG, "temperature": 1.0}),
        (True, {"temperature": 0.5}),
    ),
    case(addressed, "box:30000", "use http://host:port", "http://box:30000"),
    case(stored, "small", f"set {OPTIONS}.server_weights_dir to a directory with more space", "large"),
    # vLLM
    case(warmed_up, "vllm", "use rollout.engine=hf", "hf"),
    case(accepted, 200, f"change {OPTIONS} or rollout.max_concurrent", 100),
    case(beside_a_learner, False, f"set {OPTIONS}.separate_process=true", True),
    case(vllm_with, {"swap_space_gib": 4}, f"remove {OPTIONS}.swap_space_gib", {}),
    case(vllm_with, {"arguments": {"seed": 1}}, "set seed instead", {}),
    case(vllm_with, {"arguments": {"worker_cls": "x"}}, f"remove {OPTIONS}.arguments.worker_cls", {}),
    case(vllm_with, {"arguments": {"blok_size": 4}}, "did you mean 'block_size'?", {"arguments": {"block_size": 4}}),
    case(vllm_with, {"arguments": {"zzzzz": 1}}, f"remove {OPTIONS}.arguments.zzzzz", {}),
    # verification of weights
    case(verified, {"skew": 1.0}, "the engine computes a different model; `quintet check drift` shows where", {}),
    case(verified, {"fails": True}, "see the engine's output above", {}),
    case(differing, None, f"set {OPTIONS}.validate_weights_dir to save all differences", "differences"),
]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_directory: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "model").symlink_to(policy_directory)


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_about_an_engine_removes_its_error(entry: HintCase) -> None:
    entry.check()


def test_every_hint_about_an_engine_is_followed() -> None:
    exempt = ["rollout/engines/grammar_trials.py _fork"]  # the output of the process says why it does not start
    assert not sites_without_case("rollout/engines", CASES, exempt)


def test_the_command_that_a_hint_names_exists() -> None:
    assert "drift" in [command.callback.__name__ for command in check.app.registered_commands if command.callback]
