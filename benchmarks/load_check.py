"""Measure the check at load time on a model of 0.5 billion parameters: `python benchmarks/load_check.py`.

The model has the shape of Qwen2.5-0.5B with random weights. Loading itself is not counted. The result,
`results/load_check.json`, has for one and two threads the seconds of each part in a process that has computed nothing
before, the median of several. Beside the time on the wall it has the time of the processor, summed over the threads,
which other programs on the machine change less.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from machine import machine
from quintet.policies.attention import register_attention
from quintet.policies.inference_decoder import InferenceDecoder
from quintet.policies.model_check import check_model
from quintet.rollout.engines.hf.engine import HfEngine
from quintet.rollout.engines.hf.engine_check import TAILS, check_engine

RESULT = Path(__file__).parent / "results/load_check.json"
RUNS = 5
SHAPE: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "vocab_size": 151_936,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def build_model() -> PreTrainedModel:
    """Return the model with random weights, in float32."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM._from_config(Qwen2Config(**SHAPE), attn_implementation=register_attention())
    model = model.to_empty(device="cpu").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


def measure_once(threads: int) -> dict[str, float]:
    """Return wall seconds and processor seconds of the parts, in a process that has computed nothing before."""
    torch.set_num_threads(threads)
    model = build_model()
    parts: dict[str, Callable[[], object]] = {
        "load": lambda: check_model(model, "model"),
        "engine": lambda: check_engine(
            model, lambda small, length: HfEngine(small, max_num_seqs=len(TAILS), max_model_len=length)
        ),
        "decoder": lambda: InferenceDecoder.from_body(model.model),
    }
    seconds = {}
    for name, run in parts.items():
        wall, processor = time.perf_counter(), time.process_time()
        run()
        seconds[name] = time.perf_counter() - wall
        seconds[f"{name}_processor"] = time.process_time() - processor
    return seconds


def measure(threads: int) -> dict[str, float]:
    """Return the medians of several processes, and their sums."""
    command = [sys.executable, __file__, str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    runs = [json.loads(subprocess.check_output(command, env=environment)) for _ in range(RUNS)]
    seconds = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
    for name in ("total", "total_processor"):
        parts = (f"{part}{name.removeprefix('total')}" for part in ("load", "engine", "decoder"))
        seconds[name] = round(sum(seconds[part] for part in parts), 3)
    # of the machine, one or two of which are this program: with more, threads wait for each other
    return seconds | {"load_average": round(os.getloadavg()[0], 1)}


def main() -> int:
    """Measure in fresh processes and write the medians."""
    if len(sys.argv) > 1:
        print(json.dumps(measure_once(int(sys.argv[1]))))
        return 0
    result = {
        "machine": machine(),
        "runs": RUNS,
        "seconds": {f"{threads} threads": measure(threads) for threads in (1, 2)},
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
