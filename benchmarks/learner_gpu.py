"""Benchmark updates of a policy with 0.5 B parameters on a GPU: `fsdp2` and Megatron.

    python benchmarks/learner_gpu.py --out benchmarks/results/learner_gpu.json [--rounds 5] [--layers 24]

A model with the shape of Qwen2.5-0.5B with random weights in bfloat16 and one packed mini-batch of ragged sequences:
seconds per update (without the first), tokens per second and MFU of the median, peak memory, loss and gradient norm.
Each learner runs in its own process, alternating. On a machine without a GPU, `--tiny` checks that the script works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
TINY = {**SHAPE, "hidden_size": 56, "intermediate_size": 64, "vocab_size": 300}
SEQUENCES, SHORTEST, LONGEST = 64, 64, 1024
BACKENDS = ("fsdp2", "megatron")


def make_model(directory: Path, layers: int, *, tiny: bool) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**(TINY if tiny else SHAPE), num_hidden_layers=layers)).save_pretrained(directory)


def sequences(vocabulary: int, longest: int) -> Any:
    """Return ragged sequences, half of each response tokens."""
    import torch

    from quintet.records import Batch

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(SHORTEST if longest > SHORTEST else 4, longest, (SEQUENCES,), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
    half = (lengths // 2).repeat_interleave(lengths)
    size, mask = int(lengths.sum()), positions >= half
    return Batch(
        tokens=torch.randint(0, vocabulary, (size,), generator=generator),
        positions=positions,
        lengths=lengths,
        loss_mask=mask,
        turn=torch.zeros(size, dtype=torch.long),
        turn_end=torch.cat([torch.arange(n) == n - 1 for n in lengths.tolist()]),
        trajectory=torch.arange(SEQUENCES),
        group=torch.arange(SEQUENCES) // 8,
        logprobs=torch.zeros(size),
        rewards=torch.zeros(size),
        advantages=torch.randn(size, generator=generator) * mask,
    )


def measure(backend: str, policy: Path, rounds: int, *, tiny: bool) -> dict[str, Any]:
    """Measure one learner in this process."""
    import torch

    from quintet.algorithms.objective import CrossEntropyObjective
    from quintet.config.native.experiment import Experiment
    from quintet.runtime.learners.local_learners import LocalLearners
    from quintet.training.flops import training_flops, utilization

    config = Experiment.model_validate(
        {
            "actor": {"backend": backend, "budget": {"tokens": 256 if tiny else 16_384}},
            "policy": {"dtype": "float32" if tiny else "bfloat16"},
        }
    )
    actor = LocalLearners.build(config, policy).actor
    batch = sequences(300 if tiny else SHAPE["vocab_size"], 24 if tiny else LONGEST)
    seconds, told = [], {}
    for _ in range(rounds + 1):
        _wait()
        begun = time.perf_counter()
        told = actor.update(batch, CrossEntropyObjective(), "token-mean", 1e-6)
        _wait()
        seconds.append(time.perf_counter() - begun)
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    usual = statistics.median(seconds[1:])
    operations = training_flops(actor.model.config, batch.lengths, int(batch.loss_mask.sum()))
    return {
        "seconds": seconds[1:],
        "tokens": len(batch.tokens),
        "tokens_per_second": len(batch.tokens) / usual,
        **utilization(operations, usual),
        "memory_gib": memory,
        "told": {name: value for name, value in told.items() if isinstance(value, float)},
    }


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "POLICY"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one[0], Path(given.one[1]), given.rounds, tiny=given.tiny)))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place), given.layers, tiny=given.tiny)
        for backend in BACKENDS:
            words = ["--one", backend, place, "--rounds", str(given.rounds), *(["--tiny"] if given.tiny else [])]
            done = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True)
            found[backend] = json.loads(done.stdout.splitlines()[-1])
            print(backend, found[backend], flush=True)
            if given.out:
                text = json.dumps({"device": _device(), "layers": given.layers, **found}, indent=1)
                given.out.write_text(text + "\n")


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


if __name__ == "__main__":
    main()
