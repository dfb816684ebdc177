"""If these fail, a run with SGLang trains on wrong tokens or log-probs, or hangs when SGLang has died."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sglang_stand_in
import torch
from sglang_stand_in import Brain, Server

from quintet.config.native.rollout import EngineConfig
from quintet.errors import ConfigError, MachineError
from quintet.policies.attention import PackedLayout
from quintet.policies.model_loading import load_model, load_tokenizer
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.token_statistics import log_probs_and_entropy
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.engine import ENGINES, Engine, EngineError, EngineSetup
from quintet.rollout.engines.sglang.engine import SglangEngine, build_sglang_engine, build_sglang_server_engine
from quintet.rollout.engines.weight_source import ModuleWeights, TensorWeights
from quintet.sampling import StructuredOutput

CONTEXT = 64
LOG_PROBS = 1e-5
"""Log-prob gap between engine and learner in float32."""


@pytest.fixture
def setup(policy_directory: Path) -> EngineSetup:
    tokenizer = load_tokenizer(policy_directory)
    return EngineSetup(
        directory=policy_directory,
        model=load_model(policy_directory),
        dtype=torch.float32,
        max_num_seqs=4,
        max_model_len=CONTEXT,
        detokenize=lambda ids: tokenizer.decode(list(ids)),
        options=EngineConfig(arguments={}, detokenize=True, deterministic=True),
    )


def with_options(setup: EngineSetup, **options: Any) -> EngineSetup:
    return dataclasses.replace(setup, options=setup.options.model_copy(update=options))


@pytest.fixture
def start(setup: EngineSetup) -> Iterator[Callable[..., Server]]:
    """Running stand-in servers."""
    running: list[Server] = []

    def begin(**arguments: Any) -> Server:
        options = {"model_path": str(setup.directory), "context_length": CONTEXT + 8}
        running.append(Server(**options | {"enable_deterministic_inference": True} | arguments))
        return running[-1]

    yield begin
    for server in running:
        server.close()


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
def remote(setup: EngineSetup, server: Server) -> Iterator[Engine]:
    engine = ENGINES.get("sglang-server").load()(with_options(setup, server_url=server.url))
    yield engine
    engine.close()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in as the package `sglang`, here and in child processes."""
    folder = sglang_stand_in.install(tmp_path)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(sglang_stand_in.HERE))))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.fixture
def local(setup: EngineSetup, package: Path) -> Iterator[SglangEngine]:
    engine = ENGINES.get("sglang").load()(setup)
    yield engine
    engine.close()


def request(number: int, **changes: Any) -> Request:
    prompt = (*range(40, 50), *range(100 + number, 103 + 2 * number))
    return Request(**{"id": number, "prompt": prompt, "max_tokens": 4 + number % 5, "seed": 1000 + number, **changes})


asked_for = request
"""Under another name, where pytest's own `request` is needed."""


def run(engine: Engine, requests: list[Request]) -> dict[int, Generation]:
    for each in requests:
        engine.add_request(each)
    done: dict[int, Generation] = {}
    until(engine, lambda: not engine.busy, done)
    return done


def until(engine: Engine, over: Callable[[], bool], done: dict[int, Generation], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not over():
        assert time.monotonic() < end, "it never came to an end"
        for generation in engine.step():
            assert generation.id not in done
            done[generation.id] = generation


@torch.no_grad()
def learner(model: Any, request: Request, tokens: tuple[int, ...]) -> torch.Tensor:
    """The learner's log-probs of the same tokens."""
    whole = torch.tensor([*request.prompt, *tokens])
    places = torch.arange(len(request.prompt), len(whole))
    packed = PackedBatch(
        whole, torch.arange(len(whole)), PackedLayout(torch.tensor([len(whole)])), places - 1, whole[places]
    )
    return log_probs_and_entropy(model, packed, request.temperature or 1.0)[0]


def agree(setup: EngineSetup, request: Request, generation: Generation, model: Any = None) -> None:
    expected = learner(model or setup.model, request, generation.tokens)
    assert (torch.tensor(generation.logprobs) - expected).abs().max() <= LOG_PROBS


def test_responses_and_logprobs_are_the_policys(setup: EngineSetup, remote: Engine) -> None:
    """Eleven requests, four at a time; top-k and top-p do not change the log-probs."""
    kinds = [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 0.0}]
    asked = [request(n, **kinds[n % len(kinds)]) for n in range(11)]
    done = run(remote, asked)
    assert sorted(done) == list(range(11))
    for each in asked:
        got = done[each.id]
        assert got.finish_reason is FinishReason.LENGTH
        assert len(got.tokens) == each.max_tokens
        assert (got.weight_version, got.version_changes, got.failure) == (0, (), None)
        agree(setup, each, got)


def test_deterministic_inference_depends_only_on_the_seed(remote: Engine) -> None:
    together = run(remote, [request(n) for n in range(6)])
    alone = {n: run(remote, [request(n)])[n] for n in range(6)}
    assert {n: one.tokens for n, one in together.items()} == {n: one.tokens for n, one in alone.items()}
    assert run(remote, [request(0, seed=1)])[0].tokens != alone[0].tokens


def test_concurrent_requests_are_limited(remote: Engine, server: Server) -> None:
    server.brain.seconds = 0.005
    most = 0
    for n in range(9):
        remote.add_request(request(n))
    done: dict[int, Generation] = {}
    while remote.busy:
        done |= {one.id: one for one in remote.step()}
        most = max(most, len(server.brain.running))
    assert len(done) == 9
    assert 0 < most <= 4


def test_only_the_requests_stop_conditions_apply(setup: EngineSetup, remote: Engine, server: Server) -> None:
    """A requested token; not the model's end token, at which SGLang would stop otherwise; a stop string."""
    free = run(remote, [request(1, max_tokens=24)])[1].tokens
    own = free[9]
    stopped = run(remote, [request(1, max_tokens=24, stop_token_ids=(own,))])[1]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.tokens == free[: free.index(own) + 1]
    server.brain.model.config.eos_token_id = free[3]
    through = run(remote, [request(1, max_tokens=24, stop_token_ids=(own,))])[1]
    assert through.tokens == stopped.tokens
    agree(setup, request(1), through)
    text = setup.detokenize(free[6:8])
    cut = run(remote, [request(1, max_tokens=24, stop_strings=(text,))])[1]
    assert cut.finish_reason is FinishReason.STOP
    assert text in setup.detokenize(cut.tokens)
    assert text not in setup.detokenize(cut.tokens[:-1])


def test_generation_continues_behind_the_models_end_token(remote: Engine, server: Server) -> None:
    free = run(remote, [request(1, max_tokens=12)])[1].tokens
    own = server.brain.model.config.eos_token_id = free[3]
    server.brain.calls.clear()
    through = run(remote, [request(1, max_tokens=12, stop_token_ids=(419,))])[1]
    sent = [body for name, body in server.brain.calls if name == "generate"]
    assert len(sent) > 1
    assert tuple(sent[1]["input_ids"]) == request(1).prompt + free[: free.index(own) + 1]
    assert (through.tokens, through.finish_reason) == (free, FinishReason.LENGTH)


def test_the_end_of_the_context_ends_a_response(remote: Engine) -> None:
    got = run(remote, [request(1, max_tokens=500)])[1]
    assert got.finish_reason is FinishReason.CONTEXT
    assert len(request(1).prompt) + len(got.tokens) == remote.max_model_len


@pytest.mark.parametrize(
    "changes", [{"repetition_penalty": 1.8}, {"min_tokens": 5}, {"min_tokens": 4, "temperature": 0}]
)
def test_penalties_do_not_change_logprobs(setup: EngineSetup, remote: Engine, changes: dict[str, Any]) -> None:
    asked = request(2, max_tokens=8, stop_token_ids=tuple(range(5, 300)), **changes)
    got = run(remote, [asked])[2]
    assert len(got.tokens) >= changes.get("min_tokens", 1)
    assert got.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    agree(setup, asked, got)


@pytest.mark.parametrize(
    ("kind", "spec", "pattern"),
    [
        ("json_object", "", r"\{[^{]*\}"),
        ("json_schema", '{"type": "integer", "minimum": 10, "maximum": 99}', "[1-9][0-9]"),
        ("choice", '["Left", "Right (2)", "a|b"]', r"Left|Right \(2\)|a\|b"),
        ("regex", "[a-c]{3}", "[a-c]{3}"),
    ],
)
def test_sglang_responses_conform_to_structured_outputs(
    setup: EngineSetup, remote: Engine, kind: Any, spec: str, pattern: str
) -> None:
    """The log-probs are those without the grammar's mask."""
    ends = {"stop_token_ids": (setup.model.config.eos_token_id,), "max_tokens": 30}
    asked = [request(n, structured_output=StructuredOutput(kind, spec), **ends) for n in range(4)]
    done = run(remote, asked)
    finished = [one for one in done.values() if one.finish_reason is FinishReason.STOP]
    assert len(finished) >= (0 if kind == "json_object" else 4)
    assert all(re.fullmatch(pattern, setup.detokenize(one.tokens[:-1])) for one in finished)
    for one in asked:
        agree(setup, one, done[one.id])


def test_sglang_must_end_a_structured_output_by_a_stop_token_of_the_request(remote: Engine) -> None:
    done = run(remote, [request(0, structured_output=StructuredOutput("regex", "ab"), stop_token_ids=(7,))])
    assert "no stop token of the request" in str(done[0].failure)


def test_penalties_require_temperature_one(remote: Engine) -> None:
    with pytest.raises(ConfigError, match="repetition_penalty") as error:
        remote.add_request(request(1, repetition_penalty=1.2, temperature=0.7))
    assert error.value.key == "rollout.temperature"
    with pytest.raises(ConfigError, match="at most 2"):
        remote.add_request(request(1, repetition_penalty=2.5))


def test_a_prompt_that_fills_the_context_is_rejected_at_once(remote: Engine) -> None:
    with pytest.raises(ValueError, match="64 tokens in a context of"):
        remote.add_request(request(1, prompt=tuple(range(CONTEXT))))


def test_a_rejected_request_fails_alone(remote: Engine) -> None:
    done = run(remote, [request(0), request(1, prompt=(7, 100_000)), request(2)])
    assert done[1].finish_reason is FinishReason.FAILED
    assert done[1].failure is not None
    assert (done[1].failure.where, done[1].failure.error_type) == ("engine", "HTTP 400")
    assert "out of the vocabulary" in done[1].failure.message
    assert done[0].finish_reason is done[2].finish_reason is FinishReason.LENGTH


def test_nan_weights_fail_requests(setup: EngineSetup, remote: Engine) -> None:
    broken = {name: tensor * float("nan") for name, tensor in setup.model.named_parameters()}
    remote.load_weights(1, TensorWeights(broken.items()))
    got = run(remote, [request(0)])[0]
    assert got.finish_reason is FinishReason.FAILED
    assert got.failure is not None
    assert "NaN" in got.failure.message
    remote.load_weights(2, ModuleWeights(setup.model))
    assert run(remote, [request(0)])[0].finish_reason is FinishReason.LENGTH


def other(setup: EngineSetup, seed: int) -> Any:
    """The same policy with other weights."""
    model = load_model(setup.directory)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_new_weights_are_used_after_the_sync(setup: EngineSetup, remote: Engine) -> None:
    before = run(remote, [request(3)])[3]
    for version in range(1, 6):
        model = other(setup, version)
        remote.load_weights(version, ModuleWeights(model))
        got = run(remote, [request(3)])[3]
        assert got.weight_version == remote.weight_version == version
        agree(setup, request(3), got, model)
    assert got.logprobs != before.logprobs


@pytest.mark.parametrize("form", ["remote", "local"])
def test_tied_weights_may_be_sent_twice(setup: EngineSetup, form: str, request: pytest.FixtureRequest) -> None:
    model, engine = other(setup, 1), request.getfixturevalue(form)
    assert len(model.state_dict()) > len(dict(model.named_parameters()))
    engine.load_weights(1, TensorWeights(model.state_dict().items()))
    agree(setup, asked_for(3), run(engine, [asked_for(3)])[3], model)


def test_a_weight_sync_during_sglang_generation_is_recorded(setup: EngineSetup, remote: Engine, server: Server) -> None:
    server.brain.seconds = 0.01
    asked, model = [request(n, max_tokens=40) for n in range(6)], other(setup, 1)
    for each in asked:
        remote.add_request(each)
    done: dict[int, Generation] = {}
    until(remote, lambda: any(len(one.tokens) > 4 for one in list(server.brain.running.values())), done)
    remote.load_weights(1, ModuleWeights(model))
    until(remote, lambda: not remote.busy, done)
    assert not server.brain.paused
    spread = [one for one in done.values() if one.version_changes]
    assert spread
    for got in spread:
        ((place, version),) = got.version_changes
        assert (got.weight_version, version) == (0, 1)
        assert 0 < place < len(got.tokens)
        each = asked[got.id]
        old, new = learner(setup.model, each, got.tokens), learner(model, each, got.tokens)
        assert (torch.tensor(got.logprobs) - torch.cat([old[:place], new[place:]])).abs().max() <= LOG_PROBS
    assert all(one.weight_version == 1 for one in done.values() if not one.version_changes)


def test_responses_of_mixed_weights_without_positions_fail(setup: EngineSetup, remote: Engine, server: Server) -> None:
    server.brain.seconds, server.brain.spans = 0.01, False
    remote.add_request(request(0, max_tokens=40))
    done: dict[int, Generation] = {}
    until(remote, lambda: any(len(one.tokens) > 2 for one in list(server.brain.running.values())), done)
    remote.load_weights(1, ModuleWeights(other(setup, 1)))
    until(remote, lambda: not remote.busy, done)
    assert done[0].finish_reason is FinishReason.FAILED
    assert run(remote, [request(1)])[1].weight_version == 1


@pytest.mark.parametrize("form", ["remote", "local"])
@pytest.mark.parametrize("fault", ["missing", "unknown"])
def test_weights_that_sglang_would_ignore_are_errors(
    setup: EngineSetup, form: str, fault: str, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue(form)
    weights = dict(setup.model.named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    moved = weights.pop(name)
    if fault == "unknown":
        weights["model.layers.1.mlp.upproj.weight"] = moved
    with pytest.raises(EngineError, match=r"up_?proj"):
        engine.load_weights(1, TensorWeights(weights.items()))


def test_aborted_requests_return_partial_responses(setup: EngineSetup, remote: Engine, server: Server) -> None:
    """Running, waiting and unknown requests; other requests continue."""
    server.brain.seconds = 0.01
    for n in range(7):
        remote.add_request(request(n, max_tokens=40))
    done: dict[int, Generation] = {}
    until(
        remote,
        lambda: len(server.brain.running) == 4 and any(o.tokens for o in list(server.brain.running.values())),
        done,
    )
    dropped = {one.id: one for one in remote.abort([1, 2, 6, 99])}
    assert sorted(dropped) == [1, 2, 6]
    assert all(one.finish_reason is FinishReason.ABORT for one in dropped.values())
    assert dropped[6].tokens == ()
    for number in (1, 2):
        assert len(dropped[number].tokens) < 40
        if dropped[number].tokens:
            agree(setup, request(number), dropped[number])
    server.brain.seconds = 0.0
    until(remote, lambda: not remote.busy, done)
    assert sorted(done) == [0, 3, 4, 5]


def test_the_prefix_cache_can_be_reset_while_requests_run(remote: Engine, server: Server) -> None:
    server.brain.seconds = 0.01
    remote.add_request(request(0, max_tokens=20))
    done: dict[int, Generation] = {}
    until(remote, lambda: any(one.tokens for one in list(server.brain.running.values())), done)
    remote.reset_prefix_cache()
    names = [name for name, _ in server.brain.calls]
    assert names[-3:] == ["pause_generation", "flush_cache", "continue_generation"]
    until(remote, lambda: not remote.busy, done)
    assert done[0].finish_reason is FinishReason.LENGTH


def test_sleep_frees_what_the_options_allow(setup: EngineSetup, start: Callable[..., Server]) -> None:
    server = start(enable_memory_saver=True, enable_weights_cpu_backup=True)
    for options, tags in (
        ({}, []),
        ({"sleep_between_steps": True}, ["kv_cache"]),
        ({"offload": True}, ["kv_cache", "weights"]),
    ):
        engine = build_sglang_server_engine(with_options(setup, server_url=server.url, **options))
        engine.add_request(request(0))
        with pytest.raises(RuntimeError, match="requests are running"):
            engine.sleep()
        run(engine, [])
        engine.sleep()
        assert server.brain.asleep == tags
        engine.load_weights(1, ModuleWeights(setup.model))
        assert server.brain.asleep == [tag for tag in tags if tag != "weights"]
        if tags:
            with pytest.raises(RuntimeError, match="asleep"):
                engine.add_request(request(1))
        engine.wake_up()
        assert server.brain.asleep == []
        assert run(engine, [request(1)])[1].finish_reason is FinishReason.LENGTH


def test_a_running_server_must_match_the_options(setup: EngineSetup, start: Callable[..., Server]) -> None:
    server = start(mem_fraction_static=0.8)
    with pytest.raises(ConfigError, match=r"mem_fraction_static = 0.8 instead of 0.5") as error:
        build_sglang_server_engine(with_options(setup, server_url=server.url, memory_share=0.5))
    assert error.value.key == "rollout.engine_options.memory_share"
    build_sglang_server_engine(with_options(setup, server_url=server.url, memory_share=0.8)).close()
    with pytest.raises(ConfigError, match="enable_deterministic_inference"):
        build_sglang_server_engine(with_options(setup, server_url=start(enable_deterministic_inference=False).url))


def test_stop_strings_need_a_tokenizer_in_the_server(setup: EngineSetup, start: Callable[..., Server]) -> None:
    plain = with_options(setup, detokenize=False, server_url=start(skip_tokenizer_init=True).url)
    engine = build_sglang_server_engine(plain)
    with pytest.raises(ConfigError) as error:
        engine.add_request(request(0, stop_strings=("</answer>",)))
    assert error.value.key == "rollout.engine_options.detokenize"
    assert run(engine, [request(0)])[0].finish_reason is FinishReason.LENGTH


def test_new_weights_reach_a_server_through_the_configured_directory(
    setup: EngineSetup, server: Server, tmp_path: Path
) -> None:
    options = with_options(setup, server_url=server.url, server_weights_dir=str(tmp_path))
    engine = build_sglang_server_engine(options)
    engine.load_weights(1, ModuleWeights(setup.model))
    (loaded,) = [body for name, body in server.brain.calls if name == "update_weights_from_disk"]
    assert Path(loaded["model_path"]).parent == tmp_path
    engine.close()


def test_api_keys_come_from_the_environment(
    setup: EngineSetup, start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two keys, the admin key is used for everything except generation."""
    server = start(api_key="a", admin_api_key="b")
    with pytest.raises(EngineError, match="Unauthorized"):
        build_sglang_server_engine(with_options(setup, server_url=server.url))
    monkeypatch.setenv("SGLANG_API_KEY", "a")
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", "b")
    engine = build_sglang_server_engine(with_options(setup, server_url=server.url))
    engine.load_weights(1, ModuleWeights(setup.model))
    assert run(engine, [request(0)])[0].weight_version == 1


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("localhost:30000", ConfigError, "is not an http"),
        ("http://gpu7:30000", ConfigError, "a server on another machine reads new weights"),
        ("http://127.0.0.1:9", EngineError, "no SGLang server responds at http://127.0.0.1:9"),
    ],
)
def test_unusable_server_urls_are_errors(setup: EngineSetup, url: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_sglang_server_engine(with_options(setup, server_url=url))


def test_a_vanished_server_is_an_engine_error(setup: EngineSetup, remote: Engine, server: Server) -> None:
    server.brain.seconds = 0.01
    remote.add_request(request(0, max_tokens=40))
    remote.step()
    server.close()
    with pytest.raises(EngineError, match=r"failed in SGLang.*refused"):
        remote.load_weights(1, ModuleWeights(setup.model))


def test_a_silent_server_is_probed(remote: Engine, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection breaks when a machine vanishes from the network."""
    monkeypatch.setattr("quintet.rollout.engines.sglang.server.CHECK_SECONDS", 0.2)
    server.brain.seconds = 1.0
    remote.add_request(request(0, max_tokens=40))
    remote.step()
    time.sleep(0.3)
    remote.step()
    server.close()
    with pytest.raises(EngineError, match=f"the SGLang server at {server.url} cannot be reached"):
        until(remote, lambda: False, {})


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_launched_server_is_started_and_ended(setup: EngineSetup, package: Path) -> None:
    """The whole life cycle: start with arguments, responses, new weights, shutdown."""
    engine = ENGINES.get("sglang-server").load()(with_options(setup, server_python=sys.executable, memory_share=0.5))
    own = engine._transport._launched
    command = Path(f"/proc/{own.pid}/cmdline").read_text()
    assert "api_key" not in command
    assert own.address._key not in command
    asked = request(1)
    agree(setup, asked, run(engine, [asked])[1])
    model = other(setup, 1)
    engine.load_weights(1, ModuleWeights(model))
    got = run(engine, [asked])[1]
    assert got.weight_version == 1
    agree(setup, asked, got, model)
    engine.close()
    engine.close()
    assert not alive(own.pid)
    assert not Path(own._folder.name).exists()


def test_a_dead_server_is_an_engine_error_with_its_log(setup: EngineSetup, package: Path) -> None:
    sglang_stand_in.install(package, mute=True)
    engine = build_sglang_server_engine(setup)
    own = engine._transport._launched
    engine.add_request(request(0, max_tokens=40))
    os.kill(own.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"killed by SIGKILL(.|\n)*illegal memory access"):
        until(engine, lambda: False, {})
    engine.close()


def test_a_server_that_does_not_start_shows_its_log(setup: EngineSetup, package: Path) -> None:
    (package / "sglang/srt/entrypoints/http_server.py").write_text("raise OSError('no CUDA device here')\n")
    with pytest.raises(EngineError, match=r"ended with status 1(.|\n)*no CUDA device here"):
        build_sglang_server_engine(setup)


def test_a_launched_server_ends_with_the_run(setup: EngineSetup, package: Path) -> None:
    sglang_stand_in.install(package, mute=True)
    engine = build_sglang_server_engine(setup)
    own = engine._transport._launched
    # as the kernel does for a run that was killed
    own._process.stdin.close()
    own._process.wait(10)
    assert not alive(own.pid)
    engine.close()


def test_the_in_process_engine_generates_and_loads_weights(setup: EngineSetup, local: SglangEngine) -> None:
    asked = [request(n) for n in range(6)]
    for each in asked:
        agree(setup, each, run(local, [each])[each.id])
    model = other(setup, 1)
    local.load_weights(1, ModuleWeights(model))
    brain: Brain = local._transport._engine.brain
    assert [name for name, _ in brain.calls][-4:] == [
        *("begin_weight_update", "update_weights_from_tensor", "end_weight_update", "flush_cache")
    ]
    for each in asked:
        got = run(local, [each])[each.id]
        assert got.weight_version == 1
        agree(setup, each, got, model)


def test_the_in_process_engine_aborts_requests(setup: EngineSetup, local: SglangEngine) -> None:
    brain: Brain = local._transport._engine.brain
    brain.seconds = 0.01
    for n in range(4):
        local.add_request(request(n, max_tokens=30))
    done: dict[int, Generation] = {}
    until(local, lambda: any(len(one.tokens) > 3 for one in list(brain.running.values())), done)
    local.load_weights(1, ModuleWeights(other(setup, 1)))
    assert [one.id for one in local.abort([2])] == [2]
    until(local, lambda: not local.busy, done)
    assert sorted(done) == [0, 1, 3]
    assert any(one.version_changes for one in done.values())


def test_a_failed_sglang_process_ends_the_engine_but_not_the_run(setup: EngineSetup, package: Path) -> None:
    before = signal.getsignal(signal.SIGQUIT)
    engine = build_sglang_engine(setup)
    engine.add_request(request(0))
    os.kill(os.getpid(), signal.SIGQUIT)
    with pytest.raises(EngineError, match="a child process of SGLang failed"):
        until(engine, lambda: False, {})
    engine.close()
    assert signal.getsignal(signal.SIGQUIT) is before


def test_a_failed_start_leaves_no_processes(setup: EngineSetup, package: Path) -> None:
    text = "import sglang_stand_in as it\ndef Engine(**given):\n    it.Engine(**given)\n    raise OSError('no GPU')\n"
    (package / "sglang/srt/entrypoints/engine.py").write_text(text)
    before, children = signal.getsignal(signal.SIGQUIT), set(multiprocessing.active_children())
    with pytest.raises(EngineError, match="SGLang does not start: OSError: no GPU"):
        build_sglang_engine(setup)
    # a child of an earlier test that was reaped by its id stays in this list
    assert set(multiprocessing.active_children()) <= children
    assert signal.getsignal(signal.SIGQUIT) is before


def test_close_ends_only_sglangs_processes(setup: EngineSetup, package: Path) -> None:
    env = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
    env.start()
    engine = build_sglang_engine(setup)
    (child,) = engine._transport._engine.get_all_child_pids()
    os.kill(child, signal.SIGKILL)
    engine.add_request(request(0, max_tokens=30))
    with pytest.raises(EngineError, match=f"died .{child}"):
        until(engine, lambda: False, {})
    engine.close()
    assert not alive(child)
    assert env.is_alive()
    env.kill()
    env.join()


def test_a_missing_sglang_is_an_error_with_a_hint(setup: EngineSetup) -> None:
    with pytest.raises(ConfigError, match="'sglang' requires sglang"):
        ENGINES.get("sglang").load()
    with pytest.raises(MachineError, match="SGLang is not installed in this environment") as error:
        build_sglang_server_engine(setup)
    assert "server_python; or set rollout.engine_options.server_url" in str(error.value)
    with pytest.raises(ConfigError, match="does not run"):
        build_sglang_server_engine(with_options(setup, server_python="/nowhere/python"))
