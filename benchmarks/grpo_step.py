"""Time one GRPO step of a policy with 3 M parameters: Quintet, or TRL's `GRPOTrainer`, in its own process.

    python benchmarks/grpo_step.py quintet|trl [--dtype float32] [--updates 1] [--trl DIRECTORY]

16 prompts of 48 tokens, 8 samples of 48 tokens each without end tokens; the reward counts odd tokens. With one
update neither needs a log-prob pass: Quintet uses the engine's log-probs, TRL those of the update itself. With two
updates both do. Model, prompts and lengths are the same. Prints JSON. See `learner.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from quintet.records import Batch, Generation

PROMPTS, SAMPLES, PROMPT_TOKENS, ANSWER_TOKENS = 16, 8, 48, 48
RATE = 1e-4
STEPS = 4
"""The first isn't counted."""


def clock() -> float:
    """Return wall-clock seconds, or CPU seconds with one thread, which are independent of the machine's load."""
    return time.process_time() if os.environ.get("OMP_NUM_THREADS") == "1" else time.perf_counter()


def prompts(step: int, vocabulary: int) -> list[tuple[int, ...]]:
    draw = random.Random(step)
    return [tuple(draw.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)]


def reward(tokens: Any) -> float:
    return sum(int(token) % 2 for token in tokens) / ANSWER_TOKENS


def make_policy(directory: Path) -> Any:
    """Create a model with random weights and a word-level tokenizer, so that texts and tokens correspond."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from quintet.policies.tiny_models import PRESETS, build_model

    shape = PRESETS["grid-3m"]
    build_model(shape, shape.vocabulary, 2, 0, 0).save_pretrained(directory)
    words = {"<pad>": 0, "<unk>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, shape.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(directory)
    return fast


def text(tokens: tuple[int, ...]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def batch_of(asked: list[tuple[int, ...]], answers: list[Generation]) -> Batch:
    """Return the batch of the step with its advantages."""
    import torch

    from quintet.records import Batch

    count, length = PROMPTS * SAMPLES, PROMPT_TOKENS + ANSWER_TOKENS
    mask = torch.zeros(count, length, dtype=torch.bool)
    mask[:, PROMPT_TOKENS:] = True
    logprobs, end = torch.zeros(count, length), torch.zeros_like(mask)
    logprobs[:, PROMPT_TOKENS:] = torch.tensor([answer.logprobs for answer in answers])
    end[:, -1] = True
    scores = torch.tensor([reward(answer.tokens) for answer in answers]).view(PROMPTS, SAMPLES)
    advantages = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)
    return Batch(
        tokens=torch.tensor([asked[i // SAMPLES] + answer.tokens for i, answer in enumerate(answers)]).flatten(),
        positions=torch.arange(length).repeat(count),
        lengths=torch.full((count,), length),
        loss_mask=mask.flatten(),
        turn=torch.zeros(count * length, dtype=torch.long),
        turn_end=end.flatten(),
        trajectory=torch.arange(count),
        group=torch.arange(PROMPTS).repeat_interleave(SAMPLES),
        logprobs=logprobs.flatten(),
        rewards=(scores.view(-1, 1) * end).flatten(),
        advantages=(advantages.view(-1, 1) * mask).flatten(),
    )


class QuintetStep:
    """Engine and learner of a Quintet run."""

    def __init__(self, directory: Path, dtype: str, updates: int) -> None:
        import torch

        from quintet.algorithms.objective import PolicyObjective
        from quintet.config.native.algorithm import AlgorithmConfig
        from quintet.config.native.learners import OptimizerConfig
        from quintet.config.native.rollout import EngineConfig
        from quintet.policies.model_loading import load_model
        from quintet.rollout.engines.engine import ENGINES, EngineSetup
        from quintet.runtime.memory import keep_freed_memory
        from quintet.training.learner import ActorLearner
        from quintet.training.learner_setup import LearnerSetup
        from quintet.training.packing import MicroBatchBudget

        keep_freed_memory()
        self.model, kind = load_model(directory), getattr(torch, dtype)
        setup = EngineSetup(
            directory=directory,
            model=self.model,
            dtype=kind,
            max_num_seqs=PROMPTS * SAMPLES,
            max_model_len=PROMPT_TOKENS + ANSWER_TOKENS,
            detokenize=lambda tokens: text(tuple(tokens)),
            options=EngineConfig(),
        )
        self.engine = ENGINES.get("hf").load()(setup)
        self.actor = ActorLearner(
            self.model, OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget(16384), dtype=kind)
        )
        self.objective, self.updates = PolicyObjective(AlgorithmConfig()), updates

    def answers(self, asked: list[tuple[int, ...]], step: int) -> list[Generation]:
        from quintet.records import Request

        self.engine.reset_prefix_cache()
        for i in range(PROMPTS * SAMPLES):
            self.engine.add_request(Request(i, asked[i // SAMPLES], ANSWER_TOKENS, seed=1000 * step + i))
        found: dict[int, Generation] = {}
        while self.engine.busy:
            found |= {generation.id: generation for generation in self.engine.step()}
        return [found[i] for i in range(PROMPTS * SAMPLES)]

    def step(self, number: int) -> dict[str, float]:
        """Return the seconds of each phase."""
        from quintet.rollout.engines.weight_source import TensorWeights
        from quintet.training.packing import mini_batches

        times = [clock()]
        asked = prompts(number, self.model.config.vocab_size)
        answers = self.answers(asked, number)
        times.append(clock())
        batch = batch_of(asked, answers)
        times.append(clock())
        if self.updates > 1:
            batch = replace(batch, logprobs=self.actor.scorer.compute_log_probs(batch), rollout_logprobs=batch.logprobs)
        times.append(clock())
        for part in mini_batches(batch, PROMPTS // self.updates, None):
            self.actor.update(part, self.objective, "token-mean", RATE)
        self.engine.load_weights(number, TensorWeights(self.actor.weights(), self.actor.model))
        times.append(clock())
        names = ("generate", "score", "logprobs", "update")
        parts = {name: times[i + 1] - times[i] for i, name in enumerate(names)}
        return parts | {"step": times[-1] - times[0]}


def quintet(directory: Path, dtype: str, updates: int) -> list[dict[str, float]]:
    ours = QuintetStep(directory, dtype, updates)
    steps = [ours.step(number) for number in range(STEPS)]
    ours.engine.close()
    return steps[1:]


def trl(directory: Path, tokenizer: Any, dtype: str, updates: int, rows: int) -> list[dict[str, float]]:
    """Time TRL; `rows` sequences per forward and backward pass."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(clock())

    def score(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward(tokens) for tokens in completion_ids]

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    asked = [text(prompt) for step in range(STEPS + 1) for prompt in prompts(step, model.config.vocab_size)]
    own = PROMPTS * SAMPLES // updates
    settings = GRPOConfig(
        output_dir=str(directory / "out"),
        use_cpu=True,
        bf16=dtype == "bfloat16",
        per_device_train_batch_size=min(rows, own),
        gradient_accumulation_steps=max(1, own // rows),
        steps_per_generation=PROMPTS * SAMPLES // min(rows, own),
        num_generations=SAMPLES,
        max_completion_length=ANSWER_TOKENS,
        generation_kwargs={"min_new_tokens": ANSWER_TOKENS},
        max_steps=STEPS * updates,
        learning_rate=RATE,
        beta=0.0,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": one} for one in asked]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    shapes: list[tuple[int, ...]] = []
    seconds = _timed(trainer, shapes)
    trainer.train()
    if any(shape != (PROMPTS * SAMPLES, PROMPT_TOKENS, ANSWER_TOKENS) for shape in shapes):
        raise SystemExit(f"TRL generated {shapes}")
    whole = ends[updates - 1 :: updates]
    steps = [later - earlier for earlier, later in itertools.pairwise(whole)]
    return [{"step": step, "generate": made} for step, made in zip(steps, seconds[1:], strict=True)]


def _timed(trainer: Any, shapes: list[tuple[int, ...]]) -> list[float]:
    """Record the seconds of generation, scoring and, with several updates, log-probs."""
    plain: Callable[[Any], dict[str, Any]] = trainer._generate_and_score_completions
    seconds: list[float] = []

    def timed(inputs: Any) -> dict[str, Any]:
        started = clock()
        out = plain(inputs)
        seconds.append(clock() - started)
        shapes.append((*out["prompt_ids"].shape, out["completion_ids"].shape[1]))
        return out

    trainer._generate_and_score_completions = timed
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("who", choices=["quintet", "trl"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--rows", type=int, default=PROMPTS * SAMPLES)
    parser.add_argument("--trl", help="a directory that holds TRL and what it needs")
    arguments = parser.parse_args()
    if arguments.trl:
        sys.path.append(arguments.trl)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as place:
        tokenizer = make_policy(Path(place))
        if arguments.who == "quintet":
            steps = quintet(Path(place), arguments.dtype, arguments.updates)
        else:
            steps = trl(Path(place), tokenizer, arguments.dtype, arguments.updates, arguments.rows)
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
