"""Compute the figures of docs/scaling.md with the formulas of `quintet plan`; nothing is measured.

    python benchmarks/scaling.py [--tables]

Writes `benchmarks/results/scaling.json`; with `--tables`, prints the page's tables from that file instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from quintet.config.compose import load_experiment
from quintet.config.fit.proposals import find_fits
from quintet.config.fit.variants import Cluster
from quintet.config.plan.advice import TIGHT_FIT
from quintet.config.plan.costs import Cost
from quintet.config.plan.devices import find_device
from quintet.config.plan.format_sizes import GIB
from quintet.config.plan.memory import largest_parts, plan_memory
from quintet.config.plan.models import find_models
from quintet.config.plan.placement import check_placement, place_components
from quintet.config.plan.step_time import episodes_per_slot, step_costs, total_seconds
from quintet.errors import ConfigError

RESULTS = Path(__file__).parent / "results" / "scaling.json"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
MODELS: Mapping[str, Mapping[str, Any]] = {
    "7 B": {"model_type": "qwen2", **dict(zip(SIZES, (3584, 18944, 28, 28, 4, 152064), strict=True))},
    "70 B": {"model_type": "llama", **dict(zip(SIZES, (8192, 28672, 80, 64, 8, 128256), strict=True))},
}
"""`config.json` of Qwen2.5-7B and of Llama-3-70B."""
DEVICES = (8, 64, 1024)
PER_NODE = 8
PROMPT, RESPONSE = 1024, 8192
MODES = ("synchronous", "asynchronous", "separate")
LENGTH_RATIO = 4
"""Longest response divided by the mean one, to compare synchronous and asynchronous rollouts."""
RUN = (
    *("policy.preset=null", "policy.dtype=bfloat16", "warm_start=null", "rollout.engine=vllm", "rollout.max_turns=1"),
    *(f"rollout.max_prompt_tokens={PROMPT}", f"rollout.max_response_tokens={RESPONSE}"),
    *("training.groups_per_step=512", "training.samples_per_group=16", "training.mini_batches=4"),
    "rollout.max_concurrent=1024",
)
ASYNC = ("rollout.async_ratio=1", "rollout.partial=true")
ENGINE_SHARES = (0.25, 0.5, 0.75)
"""Shares of the GPUs that only generate, with separate GPUs for engines and learners."""
ENGINE = "rollout.engine_options"
LORA = "policy.lora.rank=16"
SLOW_NETWORK = 8
"""Adapters of a node, of which the slow network leaves one."""
SHORT = 1024
LENGTHS = {
    PROMPT + RESPONSE: (),
    SHORT: (
        *(f"rollout.max_{part}_tokens={SHORT // 2}" for part in ("prompt", "response")),
        f"training.micro_batch_tokens={SHORT}",
    ),
}
"""Settings of sequences by their tokens."""


def write_models(directory: Path) -> Mapping[str, Path]:
    """Write the `config.json` of all models and return their directories."""
    paths = {model: directory / model.replace(" ", "") for model in MODELS}
    for model, path in paths.items():
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**MODELS[model], "tie_word_embeddings": False}))
    return paths


def evaluate(path: Path, overrides: Sequence[str], slowdown: float = 1) -> dict[str, Any]:
    """Return the figures of a run; `slowdown` divides the bandwidth of the network.

    Raises:
        ConfigError: sizes do not fit the number of devices.
    """
    composed = load_experiment(None, [*RUN, f"policy.path={path}", *overrides])
    check_placement(composed)
    config = composed.experiment
    h100 = find_device("h100")
    figures = replace(h100, network=h100.network / slowdown)
    placement, models = place_components(config), find_models(config)
    memory = plan_memory(config, placement, models, int(h100.memory))
    costs = step_costs(config, placement, models, memory, figures)
    if memory.fullest is None:
        raise ValueError("a run without models")
    return {
        "step_seconds": round(total_seconds(config, {phase: cost.seconds for phase, cost in costs.items()}), 1),
        "phase_seconds": {phase: round(cost.seconds, 3) for phase, cost in costs.items()},
        "sent_gb": _gigabytes(sum(costs.values(), Cost())),
        "peak_gib": round(memory.fullest.total / GIB, 1),
        "peak_phase": memory.fullest.phase,
        "largest_parts": largest_parts(memory.fullest),
        "episodes_per_slot": round(episodes_per_slot(config, placement, models, memory, figures), 2),
    }


def _gigabytes(total: Cost) -> dict[str, dict[str, float]]:
    """Return the gigabytes that a device sends, by link and purpose."""
    sent: dict[str, dict[str, float]] = {}
    for (link, purpose), size in sorted(total.sent.items()):
        sent.setdefault(link, {})[purpose] = round(size / 1e9, 2)
    return sent


def fit(path: Path, devices: int, words: Sequence[str]) -> list[str]:
    """Return the overrides of the first proposal of `quintet plan --fit`.

    Raises:
        ConfigError: nothing fits.
    """
    given = [*RUN, f"policy.path={path}", *words]
    h100 = find_device("h100")
    cluster = Cluster(devices // PER_NODE, PER_NODE, int(h100.memory), h100)
    result = find_fits(load_experiment(None, given), cluster, lambda more: load_experiment(None, [*given, *more]))
    return [*words, *result.proposals[0].overrides]


def step_with_mean_length(figures: Mapping[str, Any], *, asynchronous: bool, separate: bool = False) -> float:
    """Return the seconds of a step whose responses are `LENGTH_RATIO` times shorter on average than the longest.

    A slot of an engine generates its episodes one after another. A synchronous step then waits at most for one more, as
    long as the longest (Graham 1966, list scheduling); an asynchronous one does not wait. With `separate` GPUs,
    learners and engines compute at the same time but for the weight sync.
    """
    episodes, phases = figures["episodes_per_slot"], dict(figures["phase_seconds"])
    waiting = 0 if asynchronous else LENGTH_RATIO - 1
    shorter = (PROMPT + RESPONSE / LENGTH_RATIO) / (PROMPT + RESPONSE)
    rollout = phases.pop("decode") * (episodes + waiting) / (episodes * LENGTH_RATIO) + phases.pop("prefill")
    update, rest = phases.pop("update of actor") * shorter, sum(phases.values())
    return round((max(rollout, update) if separate else rollout + update) + rest, 1)


def with_separate_devices(path: Path, devices: int, overrides: Sequence[str]) -> dict[str, Any] | None:
    """Return the share of GPUs for engines with which asynchronous steps on separate GPUs are shortest, and their time
    with responses of the mean length; None if no share fits."""
    kept = [word for word in overrides if not word.startswith((f"{ENGINE}.offload=", f"{ENGINE}.sleep_between_steps="))]
    best: dict[str, Any] | None = None
    for share in ENGINE_SHARES:
        learners = devices - int(devices * share)
        words = [
            *(kept if ASYNC[0] in kept else [*kept, *ASYNC]),
            f"placement.actor.devices={list(range(learners))}",
            f"placement.rollout.devices={list(range(learners, devices))}",
        ]
        try:
            figures = evaluate(path, words)
        except ConfigError:
            continue
        if figures["peak_gib"] > TIGHT_FIT * find_device("h100").memory / GIB:
            continue
        seconds = step_with_mean_length(figures, asynchronous=True, separate=True)
        if best is None or seconds < best["seconds"]:
            best = {"engine_share": share, "seconds": seconds, "peak_gib": figures["peak_gib"]}
    return best


def with_small_engines(path: Path, overrides: Sequence[str]) -> dict[str, Any] | None:
    """Return the figures with engines of one device each and the most concurrent requests that fit, None if none do."""
    for concurrent in (1024 >> halved for halved in range(5)):
        words = [f"{ENGINE}.tensor_parallel=1", f"{ENGINE}.offload=true", f"rollout.max_concurrent={concurrent}"]
        figures = evaluate(path, [*overrides, *words])
        if figures["peak_gib"] <= TIGHT_FIT * find_device("h100").memory / GIB:
            return {"max_concurrent": concurrent, **figures}
    return None


def groups(path: Path, devices: int, overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the figures of updates with sharding groups of one node, of eight nodes and of all devices, those that fit:
    with long sequences, and with sequences of `SHORT` tokens that are a micro-batch each."""
    sizes = sorted({PER_NODE, 8 * PER_NODE, devices}) if devices > PER_NODE else []
    for (tokens, lengths), often, size in product(LENGTHS.items(), (True, False), sizes):
        words = [f"actor.sharding.group_size={size}", f"actor.sharding.sync_every_micro_batch={often}".lower()]
        figures = evaluate(path, [*overrides, *lengths, *words])
        slow = evaluate(path, [*overrides, *lengths, *words], SLOW_NETWORK)
        if figures["peak_gib"] > TIGHT_FIT * find_device("h100").memory / GIB:
            continue
        yield {
            "tokens": tokens,
            "reductions": "each micro-batch" if often else "each update",
            "group": size,
            "update_seconds": figures["phase_seconds"]["update of actor"],
            "update_seconds_slow_network": slow["phase_seconds"]["update of actor"],
            "network_gb": round(sum(figures["sent_gb"].get("network", {}).values()), 1),
            "peak_gib": figures["peak_gib"],
        }


def compute_case(path: Path, devices: int) -> dict[str, Any]:
    """Return the first proposal and its figures, with LoRA if a full update does not fit."""
    words, refusal = [], None
    try:
        overrides = fit(path, devices, words)
    except ConfigError as error:
        words, refusal = [LORA], next(line.strip() for line in str(error).splitlines() if "it needs" in line)
        overrides = fit(path, devices, words)
    figures = evaluate(path, overrides)
    case: dict[str, Any] = {"overrides": overrides, "refusal_without_lora": refusal, **figures}
    case["small_engines"] = with_small_engines(path, overrides)
    case["synchronous_seconds"] = step_with_mean_length(figures, asynchronous=False)
    case["asynchronous"] = None
    try:
        overrides_async = fit(path, devices, [*words, *ASYNC])
    except ConfigError:
        pass
    else:
        seconds = step_with_mean_length(evaluate(path, overrides_async), asynchronous=True)
        case["asynchronous"] = {"overrides": overrides_async, "seconds": seconds}
    basis = case["asynchronous"]["overrides"] if case["asynchronous"] else overrides
    case["separate"] = with_separate_devices(path, devices, basis)
    case["groups"] = list(groups(path, devices, overrides))
    return case


def compute() -> list[dict[str, Any]]:
    """Return the figures of all models and numbers of devices."""
    with tempfile.TemporaryDirectory() as directory:
        paths = write_models(Path(directory))
        return [
            {"model": model, "devices": devices, **compute_case(paths[model], devices)}
            for model, devices in product(MODELS, DEVICES)
        ]


Case = Mapping[str, Any]


def _table(header: str, rows: Iterator[Sequence[str]]) -> str:
    lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([header, "| --- " * (header.count("|") - 1) + "|", *lines])


def _name(case: Case) -> list[str]:
    return [case["model"] + (" (LoRA)" if case["refusal_without_lora"] else ""), f"{case['devices']:,}"]


def _number(value: float | None) -> str:
    """Format a number with three digits or more."""
    if not value:
        return "–"
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def mode(case: Case) -> str:
    """Return the mode with the shortest steps, if responses have the mean length."""
    seconds = {"synchronous": case["synchronous_seconds"]}
    for name in MODES[1:]:
        if case[name]:
            seconds[name] = case[name]["seconds"]
    return min(seconds, key=lambda name: seconds[name])


def _separate(case: Case) -> str:
    separate = case["separate"]
    return f"{_number(separate['seconds'])} s ({separate['engine_share']:.0%})" if separate else "does not fit"


def overrides_block(cases: Sequence[Case]) -> str:
    """Return the overrides of all cases as a code block."""
    lines = (f"# {', '.join(_name(case))} GPUs\n{' '.join(case['overrides'])}" for case in cases)
    return "```\n" + "\n".join(lines) + "\n```"


def mode_table(cases: Sequence[Case]) -> str:
    """Return the table of step times, and of synchronous and asynchronous rollouts."""
    columns = ("model", "GPUs", "step", "engines of one GPU", "episodes per slot", *MODES, "mode")
    return _table(
        f"| {' | '.join(columns)} |",
        (
            [
                *_name(case),
                f"{_number(case['step_seconds'])} s",
                f"{_number(case['small_engines']['step_seconds'])} s" if case["small_engines"] else "–",
                _number(case["episodes_per_slot"]),
                f"{_number(case['synchronous_seconds'])} s",
                f"{_number(case['asynchronous']['seconds'])} s" if case["asynchronous"] else "does not fit",
                _separate(case),
                mode(case),
            ]
            for case in cases
        ),
    )


def phase_table(cases: Sequence[Case]) -> str:
    """Return the table of the shares of phases, and of the time of a weight sync."""
    names = ("prefill", "decode", "update of actor", "weight sync", "offload of actor", "offload of rollout")
    rows = (
        [
            *_name(case),
            *(f"{case['phase_seconds'].get(name, 0) / case['step_seconds']:.1%}" for name in names),
            f"{case['phase_seconds']['weight sync']:.2f} s",
        ]
        for case in cases
    )
    return _table(f"| model | GPUs | {' | '.join(names)} | time of the weight sync |", rows)


def traffic_table(cases: Sequence[Case]) -> str:
    """Return the table of the gigabytes that a device sends in a step."""
    purposes = ("gather of weights", "reduction of gradients", "tensor parallelism", "weight sync", "offload")
    links = {"link": "NVLink", "network": "network", "host": "PCIe"}
    rows = (
        [*_name(case), label, *(_number(case["sent_gb"][link].get(purpose)) for purpose in purposes)]
        for case in cases
        for link, label in links.items()
        if link in case["sent_gb"]
    )
    return _table(f"| model | GPUs | link | {' | '.join(purposes)} |", rows)


def memory_table(cases: Sequence[Case]) -> str:
    """Return the table of peaks and their largest parts."""
    rows = ([*_name(case), f"{case['peak_gib']:.1f} GiB", case["peak_phase"], case["largest_parts"]] for case in cases)
    return _table("| model | GPUs | peak | when | largest parts |", rows)


def group_table(cases: Sequence[Case]) -> str:
    """Return the table of sharding groups."""
    header = "| model | GPUs | sequences | gradients reduced | group | update | update, slow network | network | peak |"
    return _table(
        header,
        (
            [
                *_name(case),
                f"{group['tokens']:,} tokens",
                group["reductions"],
                f"{group['group']:,}",
                f"{_number(group['update_seconds'])} s",
                f"{_number(group['update_seconds_slow_network'])} s",
                f"{_number(group['network_gb'])} GB",
                f"{group['peak_gib']:.1f} GiB",
            ]
            for case in cases
            for group in case["groups"]
        ),
    )


TABLES = (overrides_block, mode_table, phase_table, traffic_table, memory_table, group_table)
"""Parts of the page, in its order."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tables", action="store_true")
    if parser.parse_args().tables:
        cases = json.loads(RESULTS.read_text())["cases"]
        sys.stdout.write("\n\n".join(table(cases) for table in TABLES) + "\n")
    else:
        RESULTS.write_text(json.dumps({"run": RUN, "cases": compute()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
