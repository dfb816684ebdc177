"""Benchmark generation: the embedded engine, `transformers.generate` and vLLM on one machine in one run.

    python benchmarks/rollout.py [--cases a b c large] [--rounds 3] [--out FILE]

Cases, each with a preset policy of random weights (c: after a warm start on demonstrations):

    a       64 prompts x 8 samples x 64 tokens, a Qwen2 with 3 M parameters
    b       the same with 8 to 128 tokens at random
    c       256 FrozenLake episodes of up to 8 turns
    large   a with a model of 100 M parameters
    half    a with the shape of Qwen2.5-0.5B, for a GPU: --device cuda --cases half --dtypes bfloat16

Every candidate runs in its own process, one after the other, in rounds; each starts with a warm-up job that is not
counted, except for the large model. Tokens per second count requested tokens only. The floor of a and b is the time
of the job's matrix products (each prompt once, each response token, attention included) at the rate of the model's
own matrix products with as many rows in the same run. Writes one JSON file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import machine

if TYPE_CHECKING:
    from quintet.records import Generation, Request
    from quintet.rollout.engines.engine import Engine

ROOT = Path(__file__).parent.parent
PROMPTS, SAMPLES, PROMPT_TOKENS, EPISODES = 64, 8, 48, 256
SHAPES = {
    "small": {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "mlp": 704, "vocabulary": 2048},
    "half": {"hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "mlp": 4864, "vocabulary": 151936},
    "large": {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "mlp": 2560, "vocabulary": 8192},
}
CONTENDERS = ("generate", "hf", "vllm")


class GenerateEngine:
    """`transformers.generate` behind the engine protocol: runs all waiting requests padded, until the longest ends."""

    def __init__(self, directory: str, dtype: str, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        self._model = model.eval().to(device)
        self._extra = {} if device == "cpu" else {"cache_implementation": "static"}
        self._waiting: list[Request] = []
        self.weight_version = 0
        self.max_model_len = 4096

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def add_request(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Generation]:
        from quintet.records import FinishReason, Generation

        torch, asked = self._torch, self._waiting
        self._waiting = []
        width = max(len(request.prompt) for request in asked)
        ids = torch.zeros(len(asked), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(asked):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        first = asked[0]
        ends = list(first.stop_token_ids) or None
        with torch.inference_mode():
            out = self._model.generate(
                ids.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                **self._extra,
                max_new_tokens=max(request.max_tokens for request in asked),
                do_sample=True,
                temperature=first.temperature,
                top_k=0,
                top_p=1.0,
                eos_token_id=ends,
                pad_token_id=0,
            )
        answers = []
        for request, row in zip(asked, out[:, width:].tolist(), strict=True):
            end = next((i for i, token in enumerate(row) if token in request.stop_token_ids), len(row) - 1)
            tokens = tuple(row[: min(end + 1, request.max_tokens)])
            reason = FinishReason.STOP if tokens[-1] in request.stop_token_ids else FinishReason.LENGTH
            answers.append(Generation(request.id, tokens, (0.0,) * len(tokens), reason, 0))
        return answers

    def abort(self, ids: Collection[int]) -> list[Generation]:
        raise NotImplementedError

    def load_weights(self, version: int, weights: Any) -> None:
        raise NotImplementedError

    def reset_prefix_cache(self) -> None: ...

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...

    def close(self) -> None: ...


def make_model(shape: str, directory: Path) -> None:
    """Create a model directory with random weights and a tokenizer."""
    from quintet.policies.tiny_models import Preset, build_model, train_tokenizer

    preset = Preset(**SHAPES[shape], context=4096)
    build_model(preset, preset.vocabulary, 2, 0, 0).save_pretrained(directory)
    train_tokenizer(640, [str(n) for n in range(1000)]).save_pretrained(directory)


def make_player(directory: Path) -> None:
    """Create a policy with 3 M parameters after a warm start that solves some episodes."""
    words = ["policy.preset=grid-3m", "training.steps=1", "name=player", f"output_dir={directory}"]
    quiet = ["validation.every_steps=-1", "validation.before_training=false", "warm_start.until_success=null"]
    command = [sys.executable, "-m", "quintet", "train", *words, *quiet, "warm_start.updates=60"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def open_engine(
    contender: str, directory: str, dtype: str, slots: int, context: int, device: str
) -> tuple[Engine, Any]:
    """Return the candidate behind the engine protocol, and the learner's model."""
    import torch

    if contender == "generate":
        return GenerateEngine(directory, dtype, device), None
    from quintet.config.native.rollout import EngineConfig
    from quintet.policies.model_loading import load_model, load_tokenizer
    from quintet.rollout.engines.engine import ENGINES, EngineSetup
    from quintet.runtime.memory import keep_freed_memory

    keep_freed_memory()
    tokenizer, model = load_tokenizer(directory), load_model(directory).to(device)
    setup = EngineSetup(
        directory=Path(directory),
        model=model,
        dtype=getattr(torch, dtype),
        max_num_seqs=slots,
        max_model_len=context,
        detokenize=lambda tokens: str(tokenizer.decode(list(tokens))),
        options=EngineConfig(),
    )
    return ENGINES.get(contender).load()(setup), model


def answers(engine: Engine, lengths: list[int], vocabulary: int) -> Callable[[int], dict[str, float]]:
    """Return a job: samples of prompts with fixed lengths and without end tokens."""
    from quintet.records import Request

    def job(number: int) -> dict[str, float]:
        draw = random.Random(number)
        prompts = [tuple(draw.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)]
        started = time.perf_counter()
        engine.reset_prefix_cache()
        for i, length in enumerate(lengths):
            engine.add_request(Request(i, prompts[i // SAMPLES], length, seed=number * 10_000 + i))
        tokens = 0
        while engine.busy:
            tokens += sum(len(generation.tokens) for generation in engine.step())
        return {"tokens": tokens, "seconds": time.perf_counter() - started}

    return job


def episodes(engine: Engine, directory: str) -> Callable[[int], dict[str, float]]:
    """Return a job: FrozenLake episodes in the agent loop."""
    from quintet.config.native.envs import FrozenLakeConfig
    from quintet.config.native.rollout import RolloutConfig
    from quintet.envs.factory import env_factory
    from quintet.envs.vector_env import LocalVectorEnv
    from quintet.policies.model_loading import load_tokenizer
    from quintet.rollout.agent_loop import AgentLoop
    from quintet.rollout.chat.chat_format import ChatFormat
    from quintet.rollout.episode import Episode
    from quintet.rollout.episode_limits import EpisodeRules
    from quintet.rollout.sampling_params import SamplingParams

    chat = ChatFormat(load_tokenizer(directory))

    def job(number: int) -> dict[str, float]:
        loop = AgentLoop(
            engine, chat, LocalVectorEnv(env_factory(FrozenLakeConfig())), [EpisodeRules("frozenlake", RolloutConfig())]
        )
        started = time.perf_counter()
        asked = [Episode(1000 * number + i // 16, i // 16, i % 16) for i in range(EPISODES)]
        played = list(loop.collect_rollouts(asked, SamplingParams(1.0, 0, 1.0, number)))
        seconds = time.perf_counter() - started
        return {
            "tokens": sum(episode.response_tokens for episode in played),
            "turns": sum(len(episode.turns) for episode in played),
            "seconds": seconds,
            "engine_seconds": loop.engine_seconds,
            "env_seconds": loop.env_seconds,
            "loop_share": (seconds - loop.engine_seconds - loop.env_seconds) / seconds,
        }

    return job


def exactness(engine: Engine, model: Any) -> dict[str, float]:
    """Compare log-probs with transformers' forward pass before and after twenty weight syncs; time a sync (ms)."""
    import torch

    from quintet.rollout.engines.weight_source import ModuleWeights

    before, seconds = gap(engine, model), []
    for version in range(1, 21):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.002)
        started = time.perf_counter()
        engine.load_weights(version, ModuleWeights(model))
        seconds.append(time.perf_counter() - started)
    return {
        "logprobs_gap": before,
        "logprobs_gap_after_20_updates": gap(engine, model),
        "update_milliseconds": round(1e3 * statistics.median(seconds), 3),
    }


def gap(engine: Engine, model: Any) -> float:
    """Return the largest difference of log-probs over 32 responses of 64 tokens."""
    import torch

    from quintet.policies.attention import register_attention
    from quintet.records import Request

    draw = random.Random(11)
    prompts = [tuple(draw.randrange(3, 600) for _ in range(PROMPT_TOKENS)) for _ in range(32)]
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(i, prompt, 64, seed=i))
    largest = 0.0
    model.set_attn_implementation("eager")
    while engine.busy:
        model.set_attn_implementation(register_attention())
        ended = engine.step()
        model.set_attn_implementation("eager")
        for one in ended:
            whole = torch.tensor([prompts[one.id] + one.tokens])
            with torch.inference_mode():
                theirs = model(whole).logits[0, PROMPT_TOKENS - 1 : -1].log_softmax(-1)
            own = theirs.gather(-1, torch.tensor(one.tokens)[:, None]).squeeze(-1)
            largest = max(largest, float((own - torch.tensor(one.logprobs)).abs().max()))
    model.set_attn_implementation(register_attention())
    return largest


def shape_of(case: str) -> dict[str, int]:
    return SHAPES[case if case in SHAPES else "small"]


def lengths_of(case: str) -> list[int]:
    draw = random.Random(7)
    return [draw.randint(8, 128) if case == "b" else 64 for _ in range(PROMPTS * SAMPLES)]


def child(arguments: argparse.Namespace) -> None:
    """Run one candidate in this process: a warm-up job, then the measured ones; print JSON."""
    case, directory = arguments.case, arguments.directory
    slots = EPISODES if case == "c" else PROMPTS * SAMPLES
    engine, model = open_engine(
        arguments.child, directory, arguments.dtype, slots, 1024 if case == "c" else 192, arguments.device
    )
    if case == "exact":
        print(json.dumps([exactness(engine, model)]))
        engine.close()
        return
    if case == "c":
        job = episodes(engine, directory)
    else:
        vocabulary = shape_of(case)["vocabulary"]
        job = answers(engine, lengths_of(case), vocabulary)
    if case != "large":
        job(0)
    jobs = [job(1 + arguments.round)]
    engine.close()
    print(json.dumps(jobs))


def rate(directory: str, dtype: str, rows: int, device: str) -> float:
    """Return multiply-adds per second of the model's matrix products, `rows` at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    weights = [module.weight.data.to(device) for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype, device=device) for w in weights}
    seconds = []
    with torch.inference_mode():
        for _ in range(30):
            started = time.perf_counter()
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
            if device != "cpu":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    return rows * sum(weight.numel() for weight in weights) / statistics.median(seconds)


def multiply_adds(shape: dict[str, int], lengths: list[int]) -> int:
    """Return the multiply-adds of a job: every prompt once, every response token, and attention."""
    hidden, dim = shape["hidden"], shape["hidden"] // shape["heads"]
    attention = hidden * dim * (2 * shape["heads"] + 2 * shape["kv_heads"])
    token = shape["layers"] * (attention + 3 * hidden * shape["mlp"])
    head = hidden * shape["vocabulary"]
    seen = [PROMPT_TOKENS * (PROMPT_TOKENS + 1) // 2] * PROMPTS
    seen += [length * PROMPT_TOKENS + length * (length + 1) // 2 for length in lengths]
    tokens = sum(lengths)
    return (PROMPTS * PROMPT_TOKENS + tokens) * token + tokens * head + 2 * hidden * shape["layers"] * sum(seen)


def run_child(
    contender: str, case: str, directory: Path, dtype: str, number: int, device: str
) -> list[dict[str, float]]:
    words = ["--child", contender, "--case", case, "--directory", str(directory), "--dtype", dtype]
    command = [sys.executable, __file__, *words, "--round", str(number), "--device", device]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    found: list[dict[str, float]] = json.loads(out.splitlines()[-1])
    return found


def measure(case: str, directory: Path, dtype: str, contenders: list[str], rounds: int, device: str) -> dict[str, Any]:
    """Run all candidates of a case, round by round."""
    jobs: dict[str, list[dict[str, float]]] = {contender: [] for contender in contenders}
    rates = []
    for number in range(rounds):
        rows = EPISODES if case == "c" else PROMPTS * SAMPLES
        rates.append(rate(str(directory), dtype, rows, device))
        for contender in contenders:
            jobs[contender] += run_child(contender, case, directory, dtype, number, device)
            print(case, dtype, contender, jobs[contender][-1], flush=True)
    pace = {name: statistics.median(job["tokens"] / job["seconds"] for job in done) for name, done in jobs.items()}
    found: dict[str, Any] = {"case": case, "dtype": dtype, "gflops": round(2 * statistics.median(rates) / 1e9, 1)}
    if case != "c":
        lengths = lengths_of(case)
        work = multiply_adds(shape_of(case), lengths)
        found["floor_tokens_per_second"] = round(sum(lengths) * statistics.median(rates) / work)
    return found | {
        "tokens_per_second": {name: round(value) for name, value in pace.items()},
        "hf_over": {name: round(pace["hf"] / value, 2) for name, value in pace.items() if name != "hf"},
        "jobs": jobs,
    }


def has_kernels() -> bool:
    """Return whether the embedded engine has its compiled kernels here."""
    import torch

    from quintet.kernels.decode import decode_kernels

    return decode_kernels(torch.float32, "cpu") is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["a", "b", "c", "large"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/rollout.json")
    for name in ("--child", "--case", "--directory", "--dtype"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    contenders = [one for one in arguments.contenders if one != "vllm" or importlib.util.find_spec("vllm")]
    on_gpu = arguments.device != "cpu"
    result: dict[str, Any] = {"machine": machine(), "kernels": not on_gpu and has_kernels(), "cases": []}
    if on_gpu:
        import torch

        result["device"] = torch.cuda.get_device_name(arguments.device)
    with tempfile.TemporaryDirectory() as place:
        for shape in {"small", *(case for case in arguments.cases if case in SHAPES)}:
            make_model(shape, Path(place) / shape)
        if "c" in arguments.cases:
            make_player(Path(place))
        where = {shape: Path(place) / shape for shape in SHAPES}
        where["c"] = Path(place) / "player/checkpoints/global_step_0/hf"
        if not on_gpu:
            result["exactness"] = {
                one: run_child(one, "exact", Path(place) / "small", "float32", 0, "cpu")[0]
                for one in contenders
                if one != "generate"
            }
            print(result["exactness"], flush=True)
        for dtype in arguments.dtypes:
            for case in arguments.cases:
                directory = where.get(case, Path(place) / "small")
                rounds = 1 if case == "large" else arguments.rounds
                result["cases"].append(measure(case, directory, dtype, contenders, rounds, arguments.device))
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
