"""If these fail, vLLM in its own process has stale weights, hangs when it dies, or leaves processes behind."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from vllm_bench import LONG, Bench, logprobs, make_policy, needs_vllm, open_bench, request, shift

from quintet.policies.model_loading import load_model
from quintet.records import FinishReason, Generation
from quintet.rollout.engines.engine import EngineError
from quintet.rollout.engines.weight_source import ModuleWeights
from quintet.sampling import StructuredOutput

pytestmark = needs_vllm
CACHE = {"kv_cache_memory_bytes": 5 * 128 * 2 * 2 * 2 * 32 * 4}
"""Five blocks of 128 tokens: a bit more than one request of maximum length."""


OF_OTHER_TESTS: set[int] = set()
"""Ids of processes that ran before this module's first test."""


def child_processes() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.fixture(scope="module", autouse=True)
def _processes_of_other_tests() -> None:
    OF_OTHER_TESTS.update(child.pid for child in child_processes())


def engine_processes() -> list[psutil.Process]:
    return [
        child
        for child in child_processes()
        if child.pid not in OF_OTHER_TESTS and "resource_tracker" not in " ".join(child.cmdline())
    ]


@pytest.fixture(scope="module")
def untied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def bench(untied_policy: Path) -> Iterator[Bench]:
    """An engine with dummy weights, a very small KV cache and chunked prefill."""
    pieces = {"chunked_prefill": True, "max_batched_tokens": 200}
    others = {"detokenize": True, "attention_backend": "CPU_ATTN", "image_cache": False}
    threads = torch.get_num_threads()
    bench = open_bench(untied_policy, separate_process=True, load_format="dummy", arguments=CACHE, **pieces, **others)
    assert torch.get_num_threads() == threads
    yield bench
    bench.engine.close()


def finish(bench: Bench) -> dict[int, Generation]:
    done: dict[int, Generation] = {}
    while bench.engine.busy:
        done |= {one.id: one for one in bench.engine.step()}
    return done


def test_vllm_responses_conform_to_structured_outputs(bench: Bench) -> None:
    """The log-probs are those without the bitmask. The rest of the batch has none."""
    schema = {"type": "object", "properties": {"move": {"enum": ["Up", "Down"]}}, "required": ["move"]}
    outputs = [
        StructuredOutput("json_schema", json.dumps(schema | {"additionalProperties": False})),
        StructuredOutput("choice", '["Left", "Right (2)"]'),
        StructuredOutput("regex", "[a-c]{3}"),
        StructuredOutput("json_object"),
    ]
    ends = {"stop_token_ids": (2,), "max_tokens": 150}
    asked = [request(n, structured_output=one, **ends) for n, one in enumerate(outputs)]
    plain = request(4, temperature=0.6)
    done = bench.run(*asked, plain)
    texts = {n: bench.setup.detokenize(done[n].tokens[:-1]) for n in range(4)}
    assert [done[n].finish_reason for n in range(3)] == [FinishReason.STOP] * 3
    assert json.loads(texts[0])["move"] in ("Up", "Down")
    assert texts[1] in ("Left", "Right (2)")
    assert re.fullmatch("[a-c]{3}", texts[2])
    assert done[3].finish_reason is FinishReason.LENGTH or isinstance(json.loads(texts[3]), dict)
    assert max(bench.gap(one, done[one.id]) for one in (*asked, plain)) < 1e-4
    assert done[4].tokens == bench.run(plain)[4].tokens


def test_a_schema_that_vllm_rejects_fails_alone(bench: Bench) -> None:
    invalid = StructuredOutput("json_schema", '{"type": "objekt"}')
    done = bench.run(request(0, structured_output=invalid, stop_token_ids=(2,)), request(1))
    assert (done[0].finish_reason, done[1].finish_reason) == (FinishReason.FAILED, FinishReason.LENGTH)


def test_initial_weights_are_the_learners(bench: Bench) -> None:
    done = bench.run(request(0), request(1, temperature=0.5))
    assert max(bench.gap(request(0), done[0]), bench.gap(request(1, temperature=0.5), done[1])) < 1e-4


def test_preempted_requests_finish_with_the_same_tokens(bench: Bench) -> None:
    """Some requests must be preempted and prefilled again."""
    asked = [request(n, prompt=(*LONG, n), max_tokens=90) for n in range(5)]
    together = bench.run(*asked)
    assert max(bench.gap(one, together[one.id]) for one in asked) < 1e-4
    assert bench.run(asked[3])[3].tokens == together[3].tokens


def test_a_weight_sync_assigns_each_token_its_version(bench: Bench, untied_policy: Path) -> None:
    """The engine runs ahead: unread tokens from before the weight sync belong to the old weights."""
    asked = [request(n, max_tokens=300) for n in range(3)]
    for one in asked:
        bench.engine.add_request(one)
    bench.engine.step()
    shift(bench.model, 3, scale=0.1)
    bench.engine.load_weights(4, ModuleWeights(bench.model))
    done = finish(bench)
    before = load_model(untied_policy)
    for one in asked:
        written = done[one.id]
        ((place, version),) = written.version_changes
        assert (written.weight_version, version) == (0, 4)
        own = logprobs(bench.model, one, written)
        own[:place] = logprobs(before, one, written)[:place]
        assert float((own - torch.tensor(written.logprobs)).abs().max()) < 1e-4


def test_other_requests_continue_after_an_abort(bench: Bench) -> None:
    bench.engine.add_request(request(0, max_tokens=300))
    bench.engine.add_request(request(1))
    bench.engine.step()
    (dropped,) = bench.engine.abort([0])
    assert dropped.finish_reason is FinishReason.ABORT
    assert finish(bench).keys() == {1}
    assert bench.run(request(2))[2].finish_reason is FinishReason.LENGTH


def test_close_leaves_no_process(bench: Bench) -> None:
    """Last use of the shared engine."""
    running = engine_processes()
    assert running
    bench.engine.close()
    assert not [one for one in running if one.is_running()]
    bench.engine.close()


def test_a_killed_engine_is_an_engine_error(untied_policy: Path) -> None:
    """The error names the signal, nothing waits for the engine, and its memory is freed."""
    bench = open_bench(untied_policy, separate_process=True)
    running = engine_processes()
    bench.engine.add_request(request(0, max_tokens=400))
    bench.engine.step()
    os.kill(running[0].pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"with 1 requests.*signal 9"):
        finish(bench)
    assert not bench.engine.busy
    assert not [one for one in running if one.is_running()]
