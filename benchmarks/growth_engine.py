"""Measure how the cost of the embedded engine grows with prompts, conversations and prefixes.

    python benchmarks/growth_engine.py [--cases memory gap chat prefixes single] [--against SRC] [--out FILE]

Cases, each at three sizes, with a Llama of random weights and the shape of SmolLM2-135M in float32:

    memory    resident memory of the keys and values of 12 prompts of 40 tokens and a long one, of what their tokens
              need, and after ten seconds of idleness
    gap       the longest gap between two tokens of 16 streams while a long prompt is read, of their median gap
    chat      processor time of the third turn of a chat, of the first turn's
    prefixes  time of 4 + 4 prompts behind two prefixes, of eight behind one
    single    time per token of one sequence, of transformers' `generate` with its cache

The exponent is the slope of the logarithm of the absolute cost over that of the size. With `--against`, the source
directory of another version (`git worktree add`), the throughput of both is compared in rounds of one run: equal and
ragged responses, and dialogues of several turns, with 3 M and 135 M parameters, by processor
time. Writes one JSON file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).parent.parent
SHAPES = {
    "3 M": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"intermediate_size": 704, "vocab_size": 2048},
    "135 M": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    | {"intermediate_size": 1536, "vocab_size": 49152},
}
SIZES = {
    "memory": (1000, 2000, 4000),
    "gap": (875, 1750, 3500),
    "chat": (200, 400, 800),
    "prefixes": (105, 210, 420),
    "single": (64, 256, 1024),
}
BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4
IDLE_SECONDS = 10


def build_model(shape: str) -> Any:
    """Return a Llama of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from quintet.policies.attention import register_attention

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=8192, tie_word_embeddings=True)
    config._attn_implementation = register_attention()
    return LlamaForCausalLM(config).eval()


def build_engine(model: Any, slots: int, context: int, *, serving: bool) -> Any:
    """Return the engine, for serving or as in training. Earlier versions do not tell these apart."""
    import inspect

    from quintet.rollout.engines.hf.engine import HfEngine

    options = {"max_pass_slowdown": 2.5, "batch_invariant": False} if serving else {}
    known = inspect.signature(HfEngine.__init__).parameters
    return HfEngine(
        model,
        max_num_seqs=slots,
        max_model_len=context,
        **{name: value for name, value in options.items() if name in known},
    )


class Requests:
    """Requests of random tokens to an engine."""

    def __init__(self, engine: Any, vocabulary: int, seed: int = 0) -> None:
        self.engine = engine
        self.draw = random.Random(seed)
        self.vocabulary = vocabulary
        self.count = 0

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.draw.randrange(3, self.vocabulary) for _ in range(count))

    def add(self, prompt: Sequence[int], max_tokens: int, number: int | None = None) -> None:
        from quintet.records import Request

        self.count += 1
        request_id = self.count if number is None else number
        self.engine.add_request(Request(request_id, tuple(prompt), max_tokens, seed=self.count, keep_kv_cache=True))

    def finish(self) -> dict[int, tuple[int, ...]]:
        """Run all requests; return the responses."""
        responses: dict[int, tuple[int, ...]] = {}
        while self.engine.busy:
            responses |= {generation.id: generation.tokens for generation in self.engine.step()}
        return responses


def resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def measure_memory(model: Any, size: int) -> dict[str, float]:
    requests = Requests(build_engine(model, 16, 8192, serving=True), model.config.vocab_size)
    requests.add(requests.tokens(16), 2)
    requests.finish()
    requests.engine.reset_prefix_cache()
    before = resident()
    prompts = [requests.tokens(40) for _ in range(12)] + [requests.tokens(size)]
    for prompt in prompts:
        requests.add(prompt, 4)
    peak = before
    while requests.engine.busy:
        requests.engine.step()
        peak = max(peak, resident())
    needed = (sum(map(len, prompts)) + 3 * len(prompts)) * BYTES_PER_TOKEN
    pool = getattr(requests.engine._scheduler, "_cache", None)
    blocks = 0 if pool is None else pool.pool.num_used * pool.pool.block_bytes
    time.sleep(IDLE_SECONDS)
    after = 0 if pool is None else pool.pool.num_used * pool.pool.block_bytes
    return {
        "cost": peak - before,
        "ratio": (peak - before) / needed,
        "blocks_ratio": blocks / needed,
        "idle_ratio": max(0, resident() - before) / needed,
        "idle_blocks": after,
    }


def measure_gap(model: Any, size: int) -> dict[str, float]:
    requests = Requests(build_engine(model, 20, 8192, serving=True), model.config.vocab_size)
    for _ in range(16):
        requests.add(requests.tokens(24), 100_000)
    gaps: list[float] = []
    long_id, finished, since, reading = 10**6, False, time.perf_counter(), 0.0
    for step in range(10_000):
        if step == 24:
            requests.add(requests.tokens(size), 2, long_id)
            reading = time.perf_counter()
        finished = any(generation.id == long_id for generation in requests.engine.step())
        now = time.perf_counter()
        if step >= 8:
            gaps.append(now - since)
        since = now
        if finished:
            break
    alone = statistics.median(gaps[:16])
    requests.engine.abort(range(1, 17))
    return {
        "cost": max(gaps),
        "ratio": max(gaps) / statistics.median(gaps),
        "of_pure_decoding": max(gaps) / alone,
        "seconds_until_read": now - reading,
    }


def measure_chat(model: Any, size: int) -> dict[str, float]:
    requests = Requests(build_engine(model, 4, 8192, serving=True), model.config.vocab_size)
    history, seconds = requests.tokens(size), list[float]()
    for _ in range(3):
        started = time.process_time()
        requests.add(history, 8)
        (response,) = requests.finish().values()
        seconds.append(time.process_time() - started)
        history = (*history, *response, *requests.tokens(16))
    return {"cost": seconds[2], "ratio": seconds[2] / seconds[0]}


def measure_prefixes(model: Any, size: int) -> dict[str, float]:
    requests = Requests(build_engine(model, 8, 8192, serving=True), model.config.vocab_size)

    def seconds(prefixes: int) -> float:
        requests.engine.reset_prefix_cache()
        heads = [requests.tokens(size) for _ in range(prefixes)]
        started = time.process_time()
        for number in range(8):
            requests.add((*heads[number % prefixes], *requests.tokens(8)), 8)
        requests.finish()
        return time.process_time() - started

    pairs = [(seconds(1), seconds(2)) for _ in range(3)]
    one, two = (statistics.median(values) for values in zip(*pairs, strict=True))
    return {"cost": two, "ratio": two / one}


def measure_single(model: Any, size: int) -> dict[str, float]:
    import copy

    import torch

    requests = Requests(build_engine(model, 1, 8192, serving=True), model.config.vocab_size)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("sdpa")
    count, ours, theirs = 12, list[float](), list[float]()
    for _ in range(3):
        prompt = requests.tokens(size)
        requests.add(prompt, 1)
        requests.finish()
        # the prompt is cached, so that all steps but the first one only decode
        requests.add(prompt, count + 1)
        requests.engine.step()
        started = time.perf_counter()
        requests.finish()
        ours.append((time.perf_counter() - started) / count)
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = reference(ids, use_cache=True)
            started = time.perf_counter()
            for _ in range(count):
                probs = out.logits[:, -1].float().softmax(-1)
                token = torch.multinomial(probs, 1)
                out = reference(token, past_key_values=out.past_key_values, use_cache=True)
            theirs.append((time.perf_counter() - started) / count)
    own, other = statistics.median(ours), statistics.median(theirs)
    return {"cost": own, "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), "other": other}


MEASURES: dict[str, Callable[[Any, int], dict[str, float]]] = {
    "memory": measure_memory,
    "gap": measure_gap,
    "chat": measure_chat,
    "prefixes": measure_prefixes,
    "single": measure_single,
}


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the logarithms."""
    xs, ys = [math.log(size) for size in sizes], [math.log(max(cost, 1e-9)) for cost in costs]
    x, y = statistics.mean(xs), statistics.mean(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def growth(cases: Iterable[str], source: Path) -> dict[str, Any]:
    """Measure each case and size in a process of its own, with the package in `source`."""
    results: dict[str, Any] = {}
    for case in cases:
        rows = [run_worker(source, ["--worker", case, str(size)]) for size in SIZES[case]]
        results[case] = {
            "sizes": SIZES[case],
            "rows": [{name: round(value, 5) for name, value in row.items()} for row in rows],
            "exponent": round(exponent(SIZES[case], [row["cost"] for row in rows]), 2),
        }
        print(case, json.dumps(results[case]), flush=True)
    return results


def run_worker(source: Path, arguments: Sequence[str]) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


JOBS = ("equal", "ragged", "dialogues")
THROUGHPUT = {"3 M": (64, 8, 48, 64), "135 M": (6, 4, 48, 24)}
"""Prompts, samples, tokens of a prompt, tokens of a response."""


def run_job(requests: Requests, shape: str, job: str, number: int) -> float:
    """Return the processor time of one job, seconds."""
    prompts, samples, prompt_tokens, response_tokens = THROUGHPUT[shape]
    requests.draw.seed(number)
    requests.engine.reset_prefix_cache()
    texts = [requests.tokens(prompt_tokens) for _ in range(prompts)]
    lengths = [response_tokens if job == "equal" else requests.draw.randint(8, 2 * response_tokens) for _ in texts]
    started = time.process_time()
    if job == "dialogues":
        histories = {n: texts[n % prompts] for n in range(prompts * samples // 4)}
        for _ in range(4):
            for n, history in histories.items():
                requests.add(history, response_tokens // 2, n)
            responses = requests.finish()
            histories = {n: (*history, *responses[n], 5, 6, 7) for n, history in histories.items()}
    else:
        for text, length in zip(texts, lengths, strict=True):
            for _ in range(samples):
                requests.add(text, length)
        requests.finish()
    return time.process_time() - started


def serve_jobs(shape: str) -> None:
    """Answer names of jobs and numbers on standard input with seconds on standard output."""
    from quintet.runtime.memory import keep_freed_memory

    keep_freed_memory()
    model = build_model(shape)
    requests = Requests(build_engine(model, 512, 512, serving=False), model.config.vocab_size)
    for line in sys.stdin:
        job, number = line.split()
        print(run_job(requests, shape, job, int(number)), flush=True)


def throughput(sources: Sequence[Path], rounds: int) -> dict[str, Any]:
    """Return the tokens per second of processor time with the second source, of those with the first one: medians over
    rounds that alternate between them."""
    results: dict[str, Any] = {}
    for shape in SHAPES:
        command = [sys.executable, __file__, "--serve-jobs", shape]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers = [
            subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(source)}, **pipes) for source in sources
        ]
        for job in JOBS:
            ratios = []
            for number in range(rounds + 1):
                seconds = [0.0, 0.0]
                for index in (0, 1) if number % 2 else (1, 0):
                    workers[index].stdin.write(f"{job} {number}\n")
                    workers[index].stdin.flush()
                    seconds[index] = float(workers[index].stdout.readline())
                if number:  # the first one warms up
                    ratios.append(seconds[0] / seconds[1])
            results[f"{shape}, {job}"] = {
                "of_before": round(statistics.median(ratios), 3),
                "rounds": [round(ratio, 3) for ratio in ratios],
            }
            print(shape, job, json.dumps(results[f"{shape}, {job}"]), flush=True)
        for worker in workers:
            worker.stdin.close()
            worker.wait()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(MEASURES), choices=MEASURES)
    parser.add_argument("--against", type=Path, help="source directory of the version to compare throughput with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--serve-jobs", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_jobs:
        serve_jobs(options.serve_jobs)
        return
    if options.worker:
        case, size = options.worker
        print(json.dumps(MEASURES[case](build_model("135 M"), int(size))))
        return
    result: dict[str, Any] = {"machine": machine()}
    result |= {"growth": growth(options.cases, ROOT / "src")} if options.cases else {}
    if options.against:
        result["throughput"] = throughput((options.against, ROOT / "src"), options.rounds)
    if options.out:
        before = json.loads(options.out.read_text()) if options.out.exists() else {}
        merged = {"growth": before.get("growth", {}) | result.pop("growth", {})}
        options.out.write_text(json.dumps(before | result | merged, indent=1) + "\n")


if __name__ == "__main__":
    main()
