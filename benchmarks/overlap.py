"""Measure what the controller adds to a large rollout, and what overlapping generation and training saves.

    python benchmarks/overlap.py [--parts controller overlap] [--out benchmarks/results/overlap.json]

Engines, environments and the learner only sleep, so that one core shows what the controller of a cluster does:

    controller  10,000 concurrent episodes of four turns on 1,000 engines, by the agent loop with chat template, parser
                and routing. The critical path is the longest episode alone: its decode steps and environment steps.
                Overhead is the time of the rollout beyond that; it contains waits for other steps of an engine.
    overlap     steps of 32 prompts with 8 responses on 8 engines of 32 slots, synchronously and overlapped. A training
                update takes as long as the synchronous rollout on average. Also draws docs/images/overlap.svg.

The length of a response is log-normal with a maximum. Not included: the transfer of requests and responses between
processes, and real weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machine import machine
from quintet.config.native.experiment import Experiment
from quintet.config.native.rollout import RolloutConfig
from quintet.policies.model_loading import load_tokenizer
from quintet.records import Request, Trajectory
from quintet.rollout.agent_loop import AgentLoop
from quintet.rollout.background_rollout import BackgroundRollout
from quintet.rollout.chat.chat_format import ChatFormat
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.rollout.engines.weight_source import TensorWeights
from quintet.rollout.episode import Episode
from quintet.rollout.episode_limits import EpisodeRules
from quintet.rollout.sampling_params import SamplingParams
from quintet.runtime.engines.engine_group import RoutedEngines
from quintet.runtime.engines.free_running_engines import FreeRunningEngines
from sleeping_components import SleepingEngine, SleepingEnvs, lognormal_length

ROOT = Path(__file__).parent.parent
ENGINES, EPISODES, GROUP, TURNS = 1000, 10_000, 16, 4
DECODE_SECONDS, ENV_SECONDS = 0.025, 0.05
LENGTHS = {"median": 256, "sigma": 0.6, "maximum": 1024}
"""Response tokens per turn of the part `controller`."""
SAMPLING = SamplingParams(1.0, 0, 1.0, 0)


def policy_tokenizer() -> Any:
    from quintet.policies.tiny_models import create_preset_policy

    with tempfile.TemporaryDirectory() as directory:
        create_preset_policy(
            "grid-1m", Path(directory), ["P _ O\n_ _ G go left <think> </think> <answer> Left"], seed=0
        )
        return load_tokenizer(directory)


def measure_controller(num_engines: int, num_episodes: int) -> dict[str, Any]:
    """Return the overhead of a rollout over its longest episode alone."""
    tokenizer = policy_tokenizer()
    chat = ChatFormat(tokenizer)
    ending = (*tokenizer.encode("</think><answer> Left </answer>", add_special_tokens=False), chat.end_token_id)
    opening = tuple(tokenizer.encode("<think> goal", add_special_tokens=False))
    filler = tuple(tokenizer.encode(" 1", add_special_tokens=False))

    @cache
    def response(seed: int) -> tuple[int, ...]:
        room = lognormal_length(seed, **LENGTHS) - len(opening) - len(ending)
        return (*opening, *(filler * max(0, room))[: max(0, room)], *ending)

    def build() -> SleepingEngine:
        return SleepingEngine(DECODE_SECONDS, 64, lambda request: response(request.seed))

    engines = FreeRunningEngines([RestartingEngine(build, None) for _ in range(num_engines)])
    config = RolloutConfig(max_turns=TURNS, window_size=None, max_prompt_tokens=1 << 20, max_response_tokens=1024)
    loop = AgentLoop(engines, chat, SleepingEnvs(ENV_SECONDS), [EpisodeRules("frozenlake", config)])
    episodes = [Episode(number // GROUP, number // GROUP, number % GROUP) for number in range(num_episodes)]
    for seed in {each.sampling_seed(SAMPLING, turn) for each in episodes for turn in range(TURNS)}:
        response(seed)  # before the clock starts: real engines sample them elsewhere
    started, processor = time.monotonic(), time.thread_time()
    trajectories = list(loop.collect_rollouts(episodes, SAMPLING))
    seconds, processor = time.monotonic() - started, time.thread_time() - processor
    loop.close()
    engines.close()
    assert all(len(each.turns) == TURNS for each in trajectories)
    longest = max(_seconds_alone(each) for each in trajectories)
    calls = sum(len(engine.busy_times) for engine in engines.engines)  # type: ignore[attr-defined]
    return {
        "engines": num_engines,
        "episodes": num_episodes,
        "seconds": seconds,
        "critical_path_seconds": longest,
        "overhead": seconds / longest - 1,
        "processor_share": processor / seconds,
        "engine_calls_per_second": calls / seconds,
        "turns_per_second": num_episodes * TURNS / seconds,
    }


def _seconds_alone(trajectory: Trajectory) -> float:
    """Return how long an episode takes if nothing waits."""
    return sum(len(turn.tokens) * DECODE_SECONDS + ENV_SECONDS for turn in trajectory.turns)


NO_WEIGHTS = TensorWeights(())
GROUPS, SAMPLES, STEPS = 32, 8, 10
RESPONSES = {"median": 150, "sigma": 0.8, "maximum": 1000}
"""Response tokens of the part `overlap`."""
OVERLAP_ENGINES, SLOTS, OVERLAP_DECODE, LOAD_SECONDS = 8, 32, 0.004, 0.02
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")


def run_steps(chat: ChatFormat, response: Callable[[Request], tuple[int, ...]], train: float, ratio: float) -> Any:
    """Run steps with updates of `train` seconds, synchronously with `ratio` 0; return seconds and metrics of each step,
    the intervals of updates and weight syncs, and the engines."""

    def build() -> SleepingEngine:
        return SleepingEngine(OVERLAP_DECODE, SLOTS, response)

    wrapped = [RestartingEngine(build, None if ratio else NO_WEIGHTS) for _ in range(OVERLAP_ENGINES)]
    engines = (FreeRunningEngines if ratio else RoutedEngines)(wrapped)
    for engine in engines.engines:
        engine.load_seconds = LOAD_SECONDS  # type: ignore[attr-defined]
    rollout = {"async_ratio": ratio, "partial": bool(ratio), "max_turns": 1, "max_response_tokens": 1000}
    training = {"groups_per_step": GROUPS, "samples_per_group": SAMPLES}
    config = Experiment.model_validate({"rollout": rollout, "training": training})
    loop = AgentLoop(engines, chat, SleepingEnvs(0.0), [EpisodeRules("frozenlake", config.rollout)])
    numbers = count()
    starts: Any = SimpleNamespace(take=lambda size: [next(numbers) for _ in range(size)], state=dict)
    background = BackgroundRollout(loop, starts, config) if ratio else None
    seconds, metrics, updates, syncs = [], [], [], []
    for step in range(1, STEPS + 1):
        started = time.monotonic()
        if background is not None:
            metrics.append(background.take(step, SAMPLING)[1])
        else:
            groups = enumerate(starts.take(GROUPS))
            list(loop.collect_rollouts([Episode(s, g, n) for g, s in groups for n in range(SAMPLES)], SAMPLING))
        generated = time.monotonic()
        time.sleep(train)
        trained = time.monotonic()
        engines.load_weights(step, NO_WEIGHTS)
        updates.append((generated, trained))
        syncs.append((trained, time.monotonic()))
        seconds.append((syncs[-1][1] - started, generated - started))
    if background is not None:
        background.close()
    return SimpleNamespace(seconds=seconds, metrics=metrics, updates=updates, syncs=syncs, engines=engines.engines)


def measure_overlap() -> dict[str, Any]:
    """Compare synchronous and overlapped steps, without the first two of each run."""
    tokenizer = policy_tokenizer()
    chat = ChatFormat(tokenizer)

    def response(request: Request) -> tuple[int, ...]:
        return (5,) * (lognormal_length(request.seed, **RESPONSES) - 1) + (chat.end_token_id,)

    probe = run_steps(chat, response, 0.0, 0.0)
    train = statistics.mean(generation for _, generation in probe.seconds)
    runs = {f"async_ratio={ratio:g}": run_steps(chat, response, train, ratio) for ratio in (0.0, 1.0, 2.0)}
    draw(runs["async_ratio=0"], runs["async_ratio=1"], ROOT / "docs/images/overlap.svg")
    steps = {name: statistics.mean(total for total, _ in run.seconds[2:]) for name, run in runs.items()}
    result: dict[str, Any] = {"lengths": RESPONSES, "train_seconds": train}
    for name, run in runs.items():
        later = run.metrics[2:]
        result[name] = {
            "seconds_per_step": steps[name],
            "speedup": steps["async_ratio=0"] / steps[name],
            "waits_for_rollout_seconds": statistics.mean(generation for _, generation in run.seconds[2:]),
            "staleness_mean": statistics.mean(each["rollout/staleness/mean"] for each in later) if later else 0.0,
            "staleness_max": max((each["rollout/staleness/max"] for each in later), default=0.0),
        }
    return result


def draw(synchronous: Any, overlapped: Any, path: Path) -> None:
    """Draw the first part of both runs on one time axis: engines by weight version, updates and weight syncs."""
    span = synchronous.syncs[3][1] - synchronous.updates[0][0]
    span, parts, top = span * 1.15, [], 0
    for title, run in (("synchronous", synchronous), ("overlapped, async_ratio=1", overlapped)):
        origin = min(engine.busy_times[0][0] for engine in run.engines)

        def bar(start: float, end: float, y: int, colour: str, origin: float = origin) -> None:
            x, width = 90 + 800 * (start - origin) / span, 800 * (end - start) / span
            if x < 890:
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{min(width, 890 - x):.1f}" height="10" fill="{colour}"/>'
                )

        parts.append(f'<text x="90" y="{top + 14}" font-weight="bold">{title}</text>')
        for row, engine in enumerate(run.engines):
            y = top + 22 + 13 * row
            parts.append(f'<text x="8" y="{y + 9}">engine {row}</text>')
            for start, end, version in _merged(engine.busy_times):
                bar(start, end, y, COLOURS[version % len(COLOURS)])
        y = top + 22 + 13 * len(run.engines)
        parts.append(f'<text x="8" y="{y + 9}">learner</text><text x="8" y="{y + 22}">weight sync</text>')
        for step, (update, sync) in enumerate(zip(run.updates, run.syncs, strict=True), 1):
            bar(*update, y, COLOURS[step % len(COLOURS)])
            bar(*sync, y + 13, "#222222")
        top = y + 40
    caption = "time to the right; colour: weight version that engines use and the learner produces"
    body = "\n".join([*parts, f'<text x="90" y="{top + 8}">{caption}</text>'])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{top + 18}" font-family="sans-serif"'
    path.write_text(f'{head} font-size="10"><rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n')


def _merged(times: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Join adjacent calls with the same weights."""
    merged: list[tuple[float, float, int]] = []
    for start, end, version in times:
        if merged and merged[-1][2] == version and start - merged[-1][1] < 0.01:
            merged[-1] = (merged[-1][0], end, version)
        else:
            merged.append((start, end, version))
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["controller", "overlap"], choices=["controller", "overlap"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/overlap.json")
    arguments = parser.parse_args()
    result = {"machine": machine()}
    if "controller" in arguments.parts:
        result["controller"] = measure_controller(ENGINES, EPISODES)
    if "overlap" in arguments.parts:
        result["overlap"] = measure_overlap()
    if arguments.out.exists():
        result = json.loads(arguments.out.read_text()) | result
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
