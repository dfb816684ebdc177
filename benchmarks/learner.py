"""Benchmark training: packed and padded updates, a GRPO step compared with TRL, log-prob memory, attention variants.

    python benchmarks/learner.py [--cases step ragged memory attention] [--trl DIRECTORY] [--rounds 2] [--out FILE]

    step        a whole GRPO step of a policy with 3 M parameters compared with TRL's `GRPOTrainer`, see
                `grpo_step.py`; skipped with a message if TRL is not installed (`--trl` is a directory made by
                `pip install --target`). The floor is the time of the step's matrix products at the rate measured
                in the same run: with a prompt per sample, and with each prompt computed once.
    ragged      an update on 64 sequences of 20 to 400 tokens: packed, and with transformers' forward pass on
                right-padded rows, with the same model, loss and optimizer
    memory      peak resident memory of the log-prob pass, forward and backward, by tokens and vocabulary
    attention   attention of one layer, forward and backward, on packed tokens: kernels, padded rows, a mask over all
                tokens, a loop over sequences, flex attention

With OMP_NUM_THREADS=1 seconds are CPU seconds, which are independent of the machine's load. Every measurement runs
in its own process, alternating between candidates. Writes one JSON file; cases that are not selected stay unchanged
in it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_step import ANSWER_TOKENS, PROMPT_TOKENS, PROMPTS, SAMPLES, clock, make_policy
from machine import machine

if TYPE_CHECKING:
    from torch import Tensor

    from quintet.records import Batch

ROOT = Path(__file__).parent.parent
CASES = ("step", "ragged", "memory", "attention")
DTYPES = ("float32", "bfloat16")
SEQUENCES, SHORTEST, LONGEST = 64, 20, 400
VOCABULARIES, PLACES, HIDDEN = (32_000, 152_000), (256, 1024, 4096), 64


def child(*words: str) -> Any:
    """Run this or a sibling script in a process; return the JSON it prints last."""
    command = [sys.executable, *words]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=ROOT).stdout
    return json.loads(out.splitlines()[-1])


def part(name: str, *words: str) -> Any:
    return child("benchmarks/learner.py", "--part", name, *words)


def median(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in found), 4) for name in found[0]}


# A GRPO step


def measure_step(rounds: int, trl: str | None) -> dict[str, Any]:
    contenders = {
        (who, dtype, updates): ["quintet", "--dtype", dtype, "--updates", str(updates)]
        for updates in (1, 2)
        for who, dtype in (("quintet", "float32"), ("quintet", "bfloat16"))
    }
    if trl is not None or importlib.util.find_spec("trl"):
        extra = ["--trl", trl] if trl else []
        for updates, rows in ((1, 64), (2, 64)):
            words = ["trl", "--updates", str(updates), "--rows", str(rows), *extra]
            contenders["trl", f"float32, {rows} rows a pass", updates] = words
    else:
        print("TRL isn't installed: pip install --target DIRECTORY --no-deps trl==1.16.0, then --trl DIRECTORY")
    steps: dict[tuple[str, str, int], list[dict[str, float]]] = {name: [] for name in contenders}
    rates: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for _ in range(rounds):
        for dtype in DTYPES:
            rates[dtype].append(part("rate", "--dtype", dtype))
        for name, words in contenders.items():
            steps[name] += child("benchmarks/grpo_step.py", *words)
            print(*name, median(steps[name]), flush=True)
    return {
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "gflops": {dtype: round(statistics.median(found) / 1e9) for dtype, found in rates.items()},
        "floor": {dtype: floors(statistics.median(found)) for dtype, found in rates.items()},
        "steps": [
            {"who": who, "what": what, "updates": updates, **median(found)}
            for (who, what, updates), found in steps.items()
        ],
        "over_trl": over_trl({name: median(found)["step"] for name, found in steps.items()}),
    }


def over_trl(seconds: dict[tuple[str, str, int], float]) -> dict[str, float]:
    """Return how many of Quintet's steps fit into TRL's fastest step."""
    fastest = {
        updates: min((s for (who, _, n), s in seconds.items() if who == "trl" and n == updates), default=0.0)
        for updates in (1, 2)
    }
    return {
        f"{dtype}, {updates} updates": round(fastest[updates] / s, 2)
        for (who, dtype, updates), s in seconds.items()
        if who == "quintet" and fastest[updates]
    }


def floors(rate: float) -> dict[str, float]:
    """Return the seconds of a step's matrix products at `rate` floating-point operations per second."""
    from quintet.policies.tiny_models import PRESETS

    shape = PRESETS["grid-3m"]
    dim = shape.hidden // shape.heads
    layer = shape.hidden * dim * (2 * shape.heads + 2 * shape.kv_heads) + 3 * shape.hidden * shape.mlp
    found = {}
    for name, prompts in (("each sample's prompt", PROMPTS * SAMPLES), ("each prompt once", PROMPTS)):
        answers = PROMPTS * SAMPLES * ANSWER_TOKENS
        seen = prompts * PROMPT_TOKENS**2 // 2 + answers * (PROMPT_TOKENS + ANSWER_TOKENS // 2)
        products = (prompts * PROMPT_TOKENS + answers) * shape.layers * layer
        products += answers * shape.hidden * shape.vocabulary + 2 * shape.hidden * shape.layers * seen
        found[name] = round(4 * 2 * products / rate, 4)
        found[f"{name}, with a log-prob pass"] = round(5 * 2 * products / rate, 4)
    return found


def rate(dtype: str) -> float:
    """Return floating-point operations per second of the small policy's matrix products, 2048 rows at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as place:
        make_policy(Path(place))
        model = AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, dtype))
    weights = [module.weight.data for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {w.shape[1]: torch.randn(2048, w.shape[1], dtype=w.dtype) for w in weights}
    seconds = clocked(lambda: [torch.nn.functional.linear(inputs[w.shape[1]], w) for w in weights], 20)
    return 2 * 2048 * sum(weight.numel() for weight in weights) / seconds


def clocked(job: Callable[[], object], times: int) -> float:
    """Return median seconds without the first two measurements."""
    seconds = []
    for _ in range(times + 2):
        started = clock()
        job()
        seconds.append(clock() - started)
    return statistics.median(seconds[2:])


# Ragged sequences


def ragged_batch(vocabulary: int) -> Batch:
    """Return sequences whose last three quarters are response tokens, with random advantages."""
    import torch

    from quintet.records import Batch

    draw, generator = random.Random(3), torch.Generator().manual_seed(3)
    lengths = torch.tensor([draw.randint(SHORTEST, LONGEST) for _ in range(SEQUENCES)])
    size = int(lengths.sum())
    positions = torch.cat([torch.arange(int(length)) for length in lengths])
    own = positions >= (lengths // 4).repeat_interleave(lengths)
    ends = torch.zeros(size, dtype=torch.bool)
    ends[lengths.cumsum(0) - 1] = True
    nothing = torch.zeros(size)
    return Batch(
        tokens=torch.randint(3, vocabulary, (size,), generator=generator),
        positions=positions,
        lengths=lengths,
        loss_mask=own,
        turn=torch.zeros(size, dtype=torch.long),
        turn_end=ends,
        trajectory=torch.arange(SEQUENCES),
        group=torch.arange(SEQUENCES) // 8,
        logprobs=nothing,
        rewards=nothing,
        advantages=torch.randn(size, generator=generator) * own,
    )


def padded_update(model: Any, batch: Batch, dtype: Any, rows: int) -> Callable[[], float]:
    """Update with transformers' forward pass on right-padded rows, `rows` at a time."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from quintet.algorithms.aggregation import Aggregation
    from quintet.algorithms.objective import PolicyObjective, batch_targets
    from quintet.config.native.algorithm import AlgorithmConfig
    from quintet.config.native.learners import OptimizerConfig
    from quintet.training.optim.optimizer import build_optimizer

    model.set_attn_implementation("sdpa")
    targets, objective = batch_targets(batch, Aggregation("token-mean")), PolicyObjective(AlgorithmConfig())
    optimizer = build_optimizer(OptimizerConfig(), model.parameters())
    lengths = batch.lengths.tolist()
    tokens, own = (pad_sequence(x.split(lengths), batch_first=True) for x in (batch.tokens, batch.loss_mask))
    mask = torch.arange(tokens.shape[1]) < batch.lengths[:, None]
    place = (batch.loss_mask.cumsum(0) - 1).split(lengths)
    places = pad_sequence(list(place), batch_first=True)

    def update() -> float:
        for start in range(0, SEQUENCES, rows):
            part = slice(start, start + rows)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
                logits = model(input_ids=tokens[part], attention_mask=mask[part].long(), use_cache=False).logits
            all_logprobs = logits[:, :-1].float().log_softmax(-1)
            entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
            logprobs = all_logprobs.gather(-1, tokens[part, 1:, None]).squeeze(-1)
            chosen = own[part, 1:]
            some = targets.at(places[part, 1:][chosen])
            loss, _ = objective(logprobs[chosen], entropy[chosen], some)
            torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OptimizerConfig().max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm)

    return update


def ragged(dtype: str, how: str) -> dict[str, float]:
    import torch

    from quintet.algorithms.objective import PolicyObjective
    from quintet.config.native.algorithm import AlgorithmConfig
    from quintet.config.native.learners import OptimizerConfig
    from quintet.policies.model_loading import load_model
    from quintet.runtime.memory import keep_freed_memory
    from quintet.training.learner import ActorLearner
    from quintet.training.learner_setup import LearnerSetup
    from quintet.training.packing import MicroBatchBudget

    keep_freed_memory()
    kind = getattr(torch, dtype)
    with tempfile.TemporaryDirectory() as place:
        make_policy(Path(place))
        model = load_model(place)
    batch = ragged_batch(model.config.vocab_size)
    if how == "packed":
        actor = ActorLearner(model, OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget(16384), dtype=kind))
        objective = PolicyObjective(AlgorithmConfig())

        def update() -> float:
            return actor.update(batch, objective, "token-mean", 1e-4)["grad_norm"]
    else:
        update = padded_update(model, batch, kind, int(how.split()[1]))
    norm = update()
    return {"grad_norm": norm, "seconds": clocked(update, 5)}


def measure_ragged(rounds: int) -> dict[str, Any]:
    ways = ("packed", "padded 64 rows at a time", "padded 16 rows at a time")
    found: dict[str, Any] = {"sequences": SEQUENCES, "lengths": [SHORTEST, LONGEST]}
    for dtype in DTYPES:
        times: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                times[way].append(part("ragged", "--dtype", dtype, "--way", way))
                print(dtype, way, times[way][-1], flush=True)
        figures = {way: median(one) for way, one in times.items()}
        fastest = min(figures[way]["seconds"] for way in ways[1:])
        found[dtype] = figures | {"packed_over_padded": round(fastest / figures["packed"]["seconds"], 2)}
    return found


# Memory


def memory(vocabulary: int, places: int, dtype: str, way: str) -> float:
    """Return the growth of peak resident memory in MiB, beyond weights and gradients."""
    import torch
    from torch import nn

    from quintet.policies.fused_log_probs import fused_token_statistics

    head = nn.Linear(HIDDEN, vocabulary, bias=False)
    targets = torch.randint(0, vocabulary, (places,))

    def run(hidden: Tensor) -> None:
        with torch.autocast("cpu", dtype=getattr(torch, dtype), enabled=dtype != "float32"):
            if way == "in pieces":
                found = fused_token_statistics(head, hidden, targets[: len(hidden)], 1.0)
                assert found is not None
                loss = (found[0] + found[1]).sum()
            else:
                all_logprobs = head(hidden).float().log_softmax(-1)
                entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
                loss = (all_logprobs.gather(-1, targets[: len(hidden), None]).squeeze(-1) + entropy).sum()
        torch.autograd.backward(loss)

    run(torch.randn(1, HIDDEN))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(torch.randn(places, HIDDEN, requires_grad=True))
    return round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1)


def measure_memory() -> list[dict[str, Any]]:
    rows = []
    for vocabulary in VOCABULARIES:
        for places in PLACES:
            row: dict[str, Any] = {"vocabulary": vocabulary, "tokens": places}
            for way in ("in pieces", "whole"):
                if way == "whole" and vocabulary * places > 2**28:
                    continue
                words = ("--vocabulary", str(vocabulary), "--places", str(places), "--dtype", "float32")
                row[f"{way}, MiB"] = part("memory", *words, "--way", way)
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--trl", help="a directory that holds TRL and what it needs")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/learner.json")
    for name in ("--part", "--dtype", "--way"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--vocabulary", "--places"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(run_part(arguments)))
        return
    from packed_attention import measure_attention

    threads = 1 if os.environ.get("OMP_NUM_THREADS") == "1" else os.cpu_count() or 1
    result = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    result["machine"] = machine()
    jobs: dict[str, Callable[[], Any]] = {
        "step": lambda: measure_step(arguments.rounds, arguments.trl),
        "ragged": lambda: measure_ragged(arguments.rounds),
        "memory": measure_memory,
        "attention": measure_attention,
    }
    for case in arguments.cases:
        result[case if threads > 1 or case == "memory" else f"{case}, one thread"] = jobs[case]()
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def run_part(arguments: argparse.Namespace) -> Any:
    if arguments.part == "rate":
        return rate(arguments.dtype)
    if arguments.part == "ragged":
        return ragged(arguments.dtype, arguments.way)
    return memory(arguments.vocabulary, arguments.places, arguments.dtype, arguments.way)


if __name__ == "__main__":
    main()
