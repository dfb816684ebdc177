"""Compare every backend and parallel split with a single process.

    python benchmarks/backends.py --out benchmarks/results/backends.json     # runs missing combinations over gloo
    python benchmarks/backends.py --docs                                      # writes docs/backends.md from the results

Five optimizer steps of a policy (each with another loss, with a KL divergence from a reference over the whole
vocabulary), two of a critic, log-probs, KL divergences and values, on ragged batches in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULT, PAGE = HERE / "results" / "backends.json", ROOT / "docs" / "backends.md"
for place in ("tests/unit/training/megatron", "tests/support", "tests"):
    sys.path.insert(0, str(ROOT / place))

BACKENDS = ("fsdp", "fsdp2", "megatron")
DEGREES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "tensor, norms by tokens": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2},
    "virtual pipeline": {"pipeline": 2, "virtual_pipeline": 2},
    "context": {"context": 2},
    "Ulysses": {"ulysses": 2},
    "expert": {"expert": 2},
}
ALIKE = ({"tensor", "tensor, norms by tokens"}, {"pipeline", "virtual pipeline"})
NUMBERS = ("loss", "grad_norm", "logprobs", "divergence", "values", "critic")
LIMIT = 1e-5


@dataclass(frozen=True)
class Cell:
    """Combination of backend, split and number of ranks."""

    backend: str
    split: str
    ranks: int
    parallel: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.backend}, {self.split}, {self.ranks} ranks"


def cells() -> Iterator[Cell]:
    """Return each split alone on two and four ranks, and each pair on four."""
    for backend in BACKENDS:
        for ranks in (2, 4):
            yield Cell(backend, "data alone", ranks, {})
            for label, degree in DEGREES.items():
                yield Cell(backend, label, ranks, degree)
        for one, other in combinations(DEGREES, 2):
            if {one, other} not in ALIKE:
                yield Cell(backend, f"{one} × {other}", 4, {**DEGREES[one], **DEGREES[other]})


def refusal(cell: Cell, directory: Path) -> str | None:
    """Return the reason why a run with this combination is refused, or None."""
    from quintet.config.native.learners import ParallelConfig
    from quintet.config.plan.model_shapes import read_shape
    from quintet.config.plan.parallelism import learner_parallelism, parallelism_problems

    shape = read_shape(json.loads((directory / "config.json").read_text()))
    split = learner_parallelism(cell.backend, ParallelConfig(**cell.parallel), None)
    return next((why for _, why in parallelism_problems(split, cell.ranks, shape)), None)


def model_of(cell: Cell, models: dict[str, Path]) -> str:
    if "expert" in cell.parallel:
        return "mixture"
    return "deep"


def measure(out: Path) -> None:
    """Run every combination that is not refused."""
    from parallel_cases import measure_in_one_process

    from conftest import save_tiny_policy

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        models = {
            "deep": save_tiny_policy(directory / "deep", experts=0, layers=4),
            "mixture": save_tiny_policy(directory / "mixture", experts=4, layers=4),
        }
        single_process = {
            model: measure_in_one_process(path, directory / f"{model}.safetensors") for model, path in models.items()
        }
        found = json.loads(out.read_text())["combinations"] if out.exists() else []
        known = {(one["backend"], one["split"], one["ranks"]) for one in found}
        for cell in (cell for cell in cells() if (cell.backend, cell.split, cell.ranks) not in known):
            model = model_of(cell, models)
            entry: dict[str, Any] = {**asdict(cell), "model": model}
            why = refusal(cell, models[model])
            entry |= (
                {"state": "refused", "why": why}
                if why
                else compare(cell, models[model], single_process[model], directory)
            )
            print(cell.name, entry["state"], entry.get("gap", entry.get("why")), file=sys.stderr)
            found.append(entry)
            out.write_text(json.dumps({"limit": LIMIT, "combinations": found}, indent=1, ensure_ascii=False) + "\n")


def compare(cell: Cell, policy: Path, single_process: Any, directory: Path) -> dict[str, Any]:
    """Run one combination; return the largest differences, relative to the largest value of their kind."""
    out = directory / cell.name.replace(" ", "_")
    out.mkdir()
    try:
        if cell.backend == "megatron":
            gaps = on_megatron(cell, policy, out)
        else:
            gaps = on_fsdp(cell, policy, out, single_process)
    except AssertionError as error:
        errors = [line for line in str(error).splitlines() if "Error: " in line]
        why = errors[-1].partition("Error: ")[2] if errors else str(error)[-300:]
        if errors and "ConfigError: " in errors[-1]:
            return {"state": "refused", "why": why}
        return {"state": "needs CUDA" if "CUDA" in why else "failed", "why": why}
    largest = max(gaps.values())
    return {"state": "equal" if largest <= LIMIT else "differs", "gap": largest, "gaps": gaps}


def on_fsdp(cell: Cell, policy: Path, out: Path, single_process: Any) -> dict[str, float]:
    """Return the differences of the FSDP and FSDP2 learners."""
    from parallel_cases import run_cases
    from safetensors.torch import load_file

    case = json.dumps({"backend": cell.backend, "parallel": cell.parallel})
    ranks, (expected, weights) = run_cases(policy, [case], cell.ranks, out)[case], single_process
    # a divergence is a small difference of large numbers: its rounding is that of these numbers, in nats
    least = {"divergence": 1.0}
    gaps = {name: max(relative(rank[name], expected[name], least.get(name, 0.0)) for rank in ranks) for name in NUMBERS}
    return gaps | {"weights": relative_norm(load_file(out / "case.safetensors"), weights)}


def on_megatron(cell: Cell, policy: Path, out: Path) -> dict[str, float]:
    """Return the differences of Megatron's actor after five steps."""
    from megatron_steps import METRICS, build_batch, train
    from rank_processes import run_ranks
    from safetensors.torch import load_file
    from test_megatron_learner import torch_learner

    settings = {"parallel": cell.parallel}
    run_ranks("megatron_steps.py", cell.ranks, out, policy.parent, out, json.dumps([[policy.name, settings]]))
    learner = torch_learner(policy, settings)
    batch = build_batch(learner.model.config.vocab_size)
    before, expected = learner.scorer.compute_log_probs(batch), train(learner, batch)
    ranks = [json.loads((out / f"0.{rank}.json").read_text()) for rank in range(cell.ranks)]
    weights = load_file(out / "0" / "weights.safetensors")
    gaps = {"logprobs": relative(weights.pop("logprobs").tolist(), before.tolist())}
    for name in METRICS[:3]:
        values = [step[name] for step in expected]
        gaps[name] = max(relative([step[name] for step in steps], values) for steps in ranks)
    if policy.name != "mixture":  # transformers holds experts in one tensor, Megatron's learner one by one
        gaps["weights"] = relative_norm(weights, dict(learner.weights()))
    return gaps


def relative_norm(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the norm of all differences divided by the norm of all weights.

    A single weight whose gradient is pure rounding may move by a whole AdamW step, so single weights are not compared.
    """
    away = sum(float((ours[key].double() - value.double()).square().sum()) for key, value in theirs.items())
    return float((away / sum(float(value.double().square().sum()) for value in theirs.values())) ** 0.5)


def relative(ours: list[float], theirs: list[float], least: float = 0.0) -> float:
    """Return the largest difference divided by the largest value, or by `least` if that is larger."""
    largest = max(least, *(abs(value) for value in theirs)) or 1.0
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / largest


INTRO = """# Which backend can split a model how?

Made by `python benchmarks/backends.py --docs` from `benchmarks/results/backends.json`. Each combination that runs was
run over gloo on CPUs against one process: five optimizer steps of a policy with a loss of another kind in each and a
divergence from a reference over the whole vocabulary, two of a critic, log-probs, divergences and values, on ragged
packed batches in float32. *Equal* means that losses, gradient norms, log-probs, values and the weights afterwards
differ by less than 1e-5 of the largest of their kind, divergences by so many nats, all weights by their norm; the
number is the largest gap.
Models have four layers, four heads, two key-value heads and, where experts are split, four experts. Data-parallel ranks
fill up what a split leaves.

`quintet plan` refuses what can't work before anything is loaded, with the reason given here.
"""
MARKS = {"equal": "equal", "refused": "refused", "needs CUDA": "needs CUDA", "differs": "differs", "failed": "fails"}


def page(result: dict[str, Any]) -> str:
    """Return the documentation page with the results."""
    parts = [INTRO]
    for backend in BACKENDS:
        rows = [one for one in result["combinations"] if one["backend"] == backend]
        parts.append(f"\n## {backend}\n\n| split | ranks | |\n| --- | --- | --- |\n")
        parts += [f"| {one['split']} | {one['ranks']} | {_told(one)} |\n" for one in rows]
    return "".join(parts)


def _told(one: dict[str, Any]) -> str:
    if one["state"] == "equal":
        return f"equal, {one['gap']:.0e}"
    return f"{MARKS[one['state']]}: {one['why'] if 'why' in one else format(one['gap'], '.1e')}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", action="store_true")
    given = parser.parse_args()
    if given.out:
        measure(given.out)
    if given.docs:
        PAGE.write_text(page(json.loads(RESULT.read_text())))
