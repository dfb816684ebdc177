"""If these fail, a run on SGLang learns from what the policy never wrote, or hangs where SGLang has ended."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
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

from quintet.config.native import EngineConfig
from quintet.errors import ConfigError, MachineError
from quintet.policies.attention import PackedLayout
from quintet.policies.causal_lm import Packed, load_model, load_tokenizer, token_statistics
from quintet.records import Generation, Request, StopReason
from quintet.rollout.engine import ENGINES, Engine, EngineFault, EngineSetup
from quintet.rollout.sglang import SglangEngine, open_sglang, open_sglang_server

CONTEXT = 64
LOG_PROBS = 1e-5
"""Between the engine and the learner, in float32."""


@pytest.fixture
def setup(policy_directory: Path) -> EngineSetup:
    tokenizer = load_tokenizer(policy_directory)
    return EngineSetup(
        directory=policy_directory,
        model=load_model(policy_directory),
        dtype=torch.float32,
        slots=4,
        context=CONTEXT,
        decode=lambda ids: tokenizer.decode(list(ids)),
        options=EngineConfig(arguments={}, detokenize=True, deterministic=True),
    )


def told(setup: EngineSetup, **options: Any) -> EngineSetup:
    return dataclasses.replace(setup, options=setup.options.model_copy(update=options))


@pytest.fixture
def start(setup: EngineSetup) -> Iterator[Callable[..., Server]]:
    """Stand-ins that are there already."""
    running: list[Server] = []

    def begin(**arguments: Any) -> Server:
        given = {"model_path": str(setup.directory), "context_length": CONTEXT + 8}
        running.append(Server(**given | {"enable_deterministic_inference": True} | arguments))
        return running[-1]

    yield begin
    for server in running:
        server.close()


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
def remote(setup: EngineSetup, server: Server) -> Iterator[Engine]:
    engine = ENGINES.get("sglang-server").load()(told(setup, server_url=server.url))
    yield engine
    engine.close()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in as the package `sglang`, here and in processes to come."""
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
        engine.submit(each)
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
def learner(model: Any, asked: Request, tokens: tuple[int, ...]) -> torch.Tensor:
    """What a learner computes for the same tokens."""
    whole = torch.tensor([*asked.prompt, *tokens])
    places = torch.arange(len(asked.prompt), len(whole))
    packed = Packed(
        whole, torch.arange(len(whole)), PackedLayout(torch.tensor([len(whole)])), places - 1, whole[places]
    )
    return token_statistics(model, packed, asked.temperature or 1.0)[0]


def agree(setup: EngineSetup, asked: Request, got: Generation, model: Any = None) -> None:
    expected = learner(model or setup.model, asked, got.tokens)
    assert (torch.tensor(got.logprobs) - expected).abs().max() <= LOG_PROBS


def test_answers_and_their_logprobs_are_the_policys(setup: EngineSetup, remote: Engine) -> None:
    """Eleven requests, four at a time; the log-probs know nothing of what narrows the draw."""
    kinds = [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 0.0}]
    asked = [request(n, **kinds[n % len(kinds)]) for n in range(11)]
    done = run(remote, asked)
    assert sorted(done) == list(range(11))
    for each in asked:
        got = done[each.id]
        assert got.stop is StopReason.LENGTH
        assert len(got.tokens) == each.max_tokens
        assert (got.weight_version, got.switches, got.failure) == (0, (), None)
        agree(setup, each, got)


def test_a_seed_alone_decides_where_sglang_is_deterministic(remote: Engine) -> None:
    together = run(remote, [request(n) for n in range(6)])
    alone = {n: run(remote, [request(n)])[n] for n in range(6)}
    assert {n: one.tokens for n, one in together.items()} == {n: one.tokens for n, one in alone.items()}
    assert run(remote, [request(0, seed=1)])[0].tokens != alone[0].tokens


def test_no_more_than_the_slots_are_on_their_way(remote: Engine, server: Server) -> None:
    server.brain.seconds = 0.005
    most = 0
    for n in range(9):
        remote.submit(request(n))
    done: dict[int, Generation] = {}
    while remote.busy:
        done |= {one.id: one for one in remote.step()}
        most = max(most, len(server.brain.running))
    assert len(done) == 9
    assert 0 < most <= 4


def test_it_stops_where_the_request_says_and_nowhere_else(setup: EngineSetup, remote: Engine, server: Server) -> None:
    """A token of its own; not the model's own end, which SGLang can't be kept from otherwise; a text."""
    free = run(remote, [request(1, max_tokens=24)])[1].tokens
    own = free[9]
    stopped = run(remote, [request(1, max_tokens=24, stop_ids=(own,))])[1]
    assert stopped.stop is StopReason.STOP
    assert stopped.tokens == free[: free.index(own) + 1]
    server.brain.model.config.eos_token_id = free[3]
    through = run(remote, [request(1, max_tokens=24, stop_ids=(own,))])[1]
    assert through.tokens == stopped.tokens
    agree(setup, request(1), through)
    text = setup.decode(free[6:8])
    cut = run(remote, [request(1, max_tokens=24, stop_texts=(text,))])[1]
    assert cut.stop is StopReason.STOP
    assert text in setup.decode(cut.tokens)
    assert text not in setup.decode(cut.tokens[:-1])


def test_the_models_own_end_is_gone_through_in_several_requests(remote: Engine, server: Server) -> None:
    free = run(remote, [request(1, max_tokens=12)])[1].tokens
    own = server.brain.model.config.eos_token_id = free[3]
    server.brain.calls.clear()
    through = run(remote, [request(1, max_tokens=12, stop_ids=(419,))])[1]
    sent = [body for name, body in server.brain.calls if name == "generate"]
    assert len(sent) > 1
    assert tuple(sent[1]["input_ids"]) == request(1).prompt + free[: free.index(own) + 1]
    assert (through.tokens, through.stop) == (free, StopReason.LENGTH)


def test_an_answer_ends_where_the_context_does(remote: Engine) -> None:
    got = run(remote, [request(1, max_tokens=500)])[1]
    assert got.stop is StopReason.CONTEXT
    assert len(request(1).prompt) + len(got.tokens) == remote.context


@pytest.mark.parametrize(
    "changes", [{"repetition_penalty": 1.8}, {"min_tokens": 5}, {"min_tokens": 4, "temperature": 0}]
)
def test_penalties_change_the_draw_and_not_the_logprobs(
    setup: EngineSetup, remote: Engine, changes: dict[str, Any]
) -> None:
    asked = request(2, max_tokens=8, stop_ids=tuple(range(5, 300)), **changes)
    got = run(remote, [asked])[2]
    assert len(got.tokens) >= changes.get("min_tokens", 1)
    assert got.stop in (StopReason.STOP, StopReason.LENGTH)
    agree(setup, asked, got)


def test_penalties_at_another_temperature_are_refused_by_name(remote: Engine) -> None:
    with pytest.raises(ConfigError, match="repetition_penalty") as error:
        remote.submit(request(1, repetition_penalty=1.2, temperature=0.7))
    assert error.value.key == "rollout.temperature"
    with pytest.raises(ConfigError, match="at most 2"):
        remote.submit(request(1, repetition_penalty=2.5))


def test_a_prompt_without_room_is_told_at_once(remote: Engine) -> None:
    with pytest.raises(ValueError, match="64 tokens in a context of"):
        remote.submit(request(1, prompt=tuple(range(CONTEXT))))


def test_what_sglang_refuses_costs_its_own_request_only(remote: Engine) -> None:
    done = run(remote, [request(0), request(1, prompt=(7, 100_000)), request(2)])
    assert done[1].stop is StopReason.FAILED
    assert done[1].failure is not None
    assert (done[1].failure.where, done[1].failure.kind) == ("engine", "HTTP 400")
    assert "out of the vocabulary" in done[1].failure.message
    assert done[0].stop is done[2].stop is StopReason.LENGTH


def test_weights_that_contain_nan_end_requests_as_failed(setup: EngineSetup, remote: Engine) -> None:
    broken = {name: tensor * float("nan") for name, tensor in setup.model.named_parameters()}
    remote.load_weights(1, broken.items())
    got = run(remote, [request(0)])[0]
    assert got.stop is StopReason.FAILED
    assert got.failure is not None
    assert "NaN" in got.failure.message
    remote.load_weights(2, setup.model.named_parameters())
    assert run(remote, [request(0)])[0].stop is StopReason.LENGTH


def other(setup: EngineSetup, seed: int) -> Any:
    """The same policy with other weights."""
    model = load_model(setup.directory)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_new_weights_write_from_then_on(setup: EngineSetup, remote: Engine) -> None:
    before = run(remote, [request(3)])[3]
    for version in range(1, 6):
        model = other(setup, version)
        remote.load_weights(version, model.named_parameters())
        got = run(remote, [request(3)])[3]
        assert got.weight_version == remote.weight_version == version
        agree(setup, request(3), got, model)
    assert got.logprobs != before.logprobs


@pytest.mark.parametrize("form", ["remote", "local"])
def test_tied_weights_may_come_twice(setup: EngineSetup, form: str, request: pytest.FixtureRequest) -> None:
    model, engine = other(setup, 1), request.getfixturevalue(form)
    assert len(model.state_dict()) > len(dict(model.named_parameters()))
    engine.load_weights(1, model.state_dict().items())
    agree(setup, asked_for(3), run(engine, [asked_for(3)])[3], model)


def test_an_answer_goes_on_under_new_weights_and_says_from_where(
    setup: EngineSetup, remote: Engine, server: Server
) -> None:
    server.brain.seconds = 0.01
    asked, model = [request(n, max_tokens=40) for n in range(6)], other(setup, 1)
    for each in asked:
        remote.submit(each)
    done: dict[int, Generation] = {}
    until(remote, lambda: any(len(one.tokens) > 4 for one in list(server.brain.running.values())), done)
    remote.load_weights(1, model.named_parameters())
    until(remote, lambda: not remote.busy, done)
    assert not server.brain.paused
    spread = [one for one in done.values() if one.switches]
    assert spread
    for got in spread:
        ((place, version),) = got.switches
        assert (got.weight_version, version) == (0, 1)
        assert 0 < place < len(got.tokens)
        each = asked[got.id]
        old, new = learner(setup.model, each, got.tokens), learner(model, each, got.tokens)
        assert (torch.tensor(got.logprobs) - torch.cat([old[:place], new[place:]])).abs().max() <= LOG_PROBS
    assert all(one.weight_version == 1 for one in done.values() if not one.switches)


def test_without_their_places_mixed_weights_arent_passed_on(setup: EngineSetup, remote: Engine, server: Server) -> None:
    server.brain.seconds, server.brain.spans = 0.01, False
    remote.submit(request(0, max_tokens=40))
    done: dict[int, Generation] = {}
    until(remote, lambda: any(len(one.tokens) > 2 for one in list(server.brain.running.values())), done)
    remote.load_weights(1, other(setup, 1).named_parameters())
    until(remote, lambda: not remote.busy, done)
    assert done[0].stop is StopReason.FAILED
    assert run(remote, [request(1)])[1].weight_version == 1


@pytest.mark.parametrize("form", ["remote", "local"])
@pytest.mark.parametrize("fault", ["missing", "unknown"])
def test_weights_that_sglang_would_pass_over_are_told(
    setup: EngineSetup, form: str, fault: str, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue(form)
    weights = dict(setup.model.named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    moved = weights.pop(name)
    if fault == "unknown":
        weights["model.layers.1.mlp.upproj.weight"] = moved
    with pytest.raises(EngineFault, match=r"up_?proj"):
        engine.load_weights(1, weights.items())


def test_what_is_dropped_comes_back_with_what_it_has(setup: EngineSetup, remote: Engine, server: Server) -> None:
    """Running ones, waiting ones, one that nobody knows; their neighbours go on."""
    server.brain.seconds = 0.01
    for n in range(7):
        remote.submit(request(n, max_tokens=40))
    done: dict[int, Generation] = {}
    until(
        remote,
        lambda: len(server.brain.running) == 4 and any(o.tokens for o in list(server.brain.running.values())),
        done,
    )
    dropped = {one.id: one for one in remote.abort([1, 2, 6, 99])}
    assert sorted(dropped) == [1, 2, 6]
    assert all(one.stop is StopReason.ABORT for one in dropped.values())
    assert dropped[6].tokens == ()
    for number in (1, 2):
        assert len(dropped[number].tokens) < 40
        if dropped[number].tokens:
            agree(setup, request(number), dropped[number])
    server.brain.seconds = 0.0
    until(remote, lambda: not remote.busy, done)
    assert sorted(done) == [0, 3, 4, 5]


def test_it_forgets_while_requests_run(remote: Engine, server: Server) -> None:
    server.brain.seconds = 0.01
    remote.submit(request(0, max_tokens=20))
    done: dict[int, Generation] = {}
    until(remote, lambda: any(one.tokens for one in list(server.brain.running.values())), done)
    remote.forget()
    names = [name for name, _ in server.brain.calls]
    assert names[-3:] == ["pause_generation", "flush_cache", "continue_generation"]
    until(remote, lambda: not remote.busy, done)
    assert done[0].stop is StopReason.LENGTH


def test_it_sleeps_as_much_as_it_may(setup: EngineSetup, start: Callable[..., Server]) -> None:
    server = start(enable_memory_saver=True, enable_weights_cpu_backup=True)
    for options, tags in (
        ({}, []),
        ({"sleep_between_steps": True}, ["kv_cache"]),
        ({"offload": True}, ["kv_cache", "weights"]),
    ):
        engine = open_sglang_server(told(setup, server_url=server.url, **options))
        engine.submit(request(0))
        with pytest.raises(RuntimeError, match="requests run"):
            engine.sleep()
        run(engine, [])
        engine.sleep()
        assert server.brain.asleep == tags
        engine.load_weights(1, setup.model.named_parameters())
        assert server.brain.asleep == [tag for tag in tags if tag != "weights"]
        if tags:
            with pytest.raises(RuntimeError, match="sleeps"):
                engine.submit(request(1))
        engine.wake()
        assert server.brain.asleep == []
        assert run(engine, [request(1)])[1].stop is StopReason.LENGTH


def test_a_server_must_run_with_what_is_asked_for(setup: EngineSetup, start: Callable[..., Server]) -> None:
    server = start(mem_fraction_static=0.8)
    with pytest.raises(ConfigError, match=r"mem_fraction_static should be 0.5.*has 0.8") as error:
        open_sglang_server(told(setup, server_url=server.url, memory_share=0.5))
    assert error.value.key == "rollout.engine_options.memory_share"
    open_sglang_server(told(setup, server_url=server.url, memory_share=0.8)).close()
    with pytest.raises(ConfigError, match="enable_deterministic_inference"):
        open_sglang_server(told(setup, server_url=start(enable_deterministic_inference=False).url))


def test_texts_need_a_tokenizer_in_the_server(setup: EngineSetup, start: Callable[..., Server]) -> None:
    plain = told(setup, detokenize=False, server_url=start(skip_tokenizer_init=True).url)
    engine = open_sglang_server(plain)
    with pytest.raises(ConfigError) as error:
        engine.submit(request(0, stop_texts=("</answer>",)))
    assert error.value.key == "rollout.engine_options.detokenize"
    assert run(engine, [request(0)])[0].stop is StopReason.LENGTH


def test_keys_come_from_the_environment(
    setup: EngineSetup, start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a server has two, the second is for everything but generation."""
    server = start(api_key="a", admin_api_key="b")
    with pytest.raises(EngineFault, match="Unauthorized"):
        open_sglang_server(told(setup, server_url=server.url))
    monkeypatch.setenv("SGLANG_API_KEY", "a")
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", "b")
    engine = open_sglang_server(told(setup, server_url=server.url))
    engine.load_weights(1, setup.model.named_parameters())
    assert run(engine, [request(0)])[0].weight_version == 1


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("localhost:30000", ConfigError, "is no address"),
        ("http://gpu7:30000", ConfigError, "a server elsewhere reads new weights from a directory"),
        ("http://127.0.0.1:9", EngineFault, "no SGLang server answers at http://127.0.0.1:9"),
    ],
)
def test_an_address_without_a_server_is_told(setup: EngineSetup, url: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        open_sglang_server(told(setup, server_url=url))


def test_a_server_that_vanishes_is_a_fault_of_the_engine(setup: EngineSetup, remote: Engine, server: Server) -> None:
    server.brain.seconds = 0.01
    remote.submit(request(0, max_tokens=40))
    remote.step()
    server.close()
    with pytest.raises(EngineFault, match=r"SGLang didn't do .*refused"):
        remote.load_weights(1, setup.model.named_parameters())


def test_a_server_that_falls_silent_is_looked_for(
    remote: Engine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing breaks off where a machine vanishes from the network."""
    monkeypatch.setattr("quintet.rollout.sglang_server.SILENCE_SECONDS", 0.2)
    server.brain.seconds = 1.0
    remote.submit(request(0, max_tokens=40))
    remote.step()
    time.sleep(0.3)
    remote.step()
    server.close()
    with pytest.raises(EngineFault, match=f"the SGLang server at {server.url} can't be reached"):
        until(remote, lambda: False, {})


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_server_of_its_own_is_started_told_and_ended(setup: EngineSetup, package: Path) -> None:
    """Its whole life in one: a process with the arguments, answers, new weights, the end."""
    engine = ENGINES.get("sglang-server").load()(told(setup, server_python=sys.executable, memory_share=0.5))
    own = engine._link._own
    command = Path(f"/proc/{own.pid}/cmdline").read_text()
    assert "api_key" not in command
    assert own.address._key not in command
    asked = request(1)
    agree(setup, asked, run(engine, [asked])[1])
    model = other(setup, 1)
    engine.load_weights(1, model.named_parameters())
    got = run(engine, [asked])[1]
    assert got.weight_version == 1
    agree(setup, asked, got, model)
    engine.close()
    engine.close()
    assert not alive(own.pid)
    assert not Path(own._folder.name).exists()


def test_a_server_that_dies_is_a_fault_with_its_last_words(setup: EngineSetup, package: Path) -> None:
    sglang_stand_in.install(package, mute=True)
    engine = open_sglang_server(setup)
    own = engine._link._own
    engine.submit(request(0, max_tokens=40))
    os.kill(own.pid, signal.SIGKILL)
    with pytest.raises(EngineFault, match=r"killed by SIGKILL(.|\n)*illegal memory access"):
        until(engine, lambda: False, {})
    engine.close()


def test_a_server_that_doesnt_come_up_says_why(setup: EngineSetup, package: Path) -> None:
    (package / "sglang/srt/entrypoints/http_server.py").write_text("raise OSError('no CUDA device here')\n")
    with pytest.raises(EngineFault, match=r"ended with status 1(.|\n)*no CUDA device here"):
        open_sglang_server(setup)


def test_a_server_ends_with_the_run_however_that_ends(setup: EngineSetup, package: Path) -> None:
    sglang_stand_in.install(package, mute=True)
    engine = open_sglang_server(setup)
    own = engine._link._own
    # as the kernel does for a run that was killed
    own._process.stdin.close()
    own._process.wait(10)
    assert not alive(own.pid)
    engine.close()


def test_the_engine_of_this_process_answers_and_learns(setup: EngineSetup, local: SglangEngine) -> None:
    asked = [request(n) for n in range(6)]
    for each in asked:
        agree(setup, each, run(local, [each])[each.id])
    model = other(setup, 1)
    local.load_weights(1, model.named_parameters())
    brain: Brain = local._link._engine.brain
    assert [name for name, _ in brain.calls][-4:] == [
        *("begin_weight_update", "update_weights_from_tensor", "end_weight_update", "flush_cache")
    ]
    for each in asked:
        got = run(local, [each])[each.id]
        assert got.weight_version == 1
        agree(setup, each, got, model)


def test_the_engine_of_this_process_drops_and_goes_on(setup: EngineSetup, local: SglangEngine) -> None:
    brain: Brain = local._link._engine.brain
    brain.seconds = 0.01
    for n in range(4):
        local.submit(request(n, max_tokens=30))
    done: dict[int, Generation] = {}
    until(local, lambda: any(len(one.tokens) > 3 for one in list(brain.running.values())), done)
    local.load_weights(1, other(setup, 1).named_parameters())
    assert [one.id for one in local.abort([2])] == [2]
    until(local, lambda: not local.busy, done)
    assert sorted(done) == [0, 1, 3]
    assert any(one.switches for one in done.values())


def test_a_process_of_sglangs_that_fails_ends_the_engine_and_not_the_run(setup: EngineSetup, package: Path) -> None:
    before = signal.getsignal(signal.SIGQUIT)
    engine = open_sglang(setup)
    engine.submit(request(0))
    os.kill(os.getpid(), signal.SIGQUIT)
    with pytest.raises(EngineFault, match="a process of SGLang's has failed"):
        until(engine, lambda: False, {})
    engine.close()
    assert signal.getsignal(signal.SIGQUIT) is before


def test_an_engine_that_doesnt_come_up_leaves_nothing_behind(setup: EngineSetup, package: Path) -> None:
    text = "import sglang_stand_in as it\ndef Engine(**given):\n    it.Engine(**given)\n    raise OSError('no GPU')\n"
    (package / "sglang/srt/entrypoints/engine.py").write_text(text)
    before = signal.getsignal(signal.SIGQUIT)
    with pytest.raises(EngineFault, match="SGLang doesn't come up: OSError: no GPU"):
        open_sglang(setup)
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGQUIT) is before


def test_closing_ends_sglangs_processes_and_no_others(setup: EngineSetup, package: Path) -> None:
    world = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
    world.start()
    engine = open_sglang(setup)
    (child,) = engine._link._engine.get_all_child_pids()
    os.kill(child, signal.SIGKILL)
    engine.submit(request(0, max_tokens=30))
    with pytest.raises(EngineFault, match=f"has ended .{child}"):
        until(engine, lambda: False, {})
    engine.close()
    assert not alive(child)
    assert world.is_alive()
    world.kill()
    world.join()


def test_what_isnt_installed_is_told_with_what_to_do(setup: EngineSetup) -> None:
    with pytest.raises(ConfigError, match="'sglang' needs sglang"):
        ENGINES.get("sglang").load()
    with pytest.raises(MachineError, match="SGLang isn't installed here") as error:
        open_sglang_server(setup)
    assert "server_python" in str(error.value)
    with pytest.raises(ConfigError, match="isn't a Python that runs"):
        open_sglang_server(told(setup, server_python="/nowhere/python"))
