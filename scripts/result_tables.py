"""Tables of README.md and docs/dialects.md from `benchmarks/results`: how many files of which projects plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quintet.config.dialects.releases import load_releases

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
FRAMEWORKS = {"verl": "verl", "ragen": "RAGEN", "vagen": "VAGEN", "rlinf": "RLinf", "roll": "ROLL"}
NOT_COMPARED = ("framework refuses", "not derived")
"""Outcomes of files of other projects without expected values."""
REMARKS = {7: ", projects not used before"}
"""What a table says of a seed."""


def markdown_row(cells: Sequence[object]) -> str:
    """Return a row of a table in Markdown."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def markdown_table(head: Sequence[str], rows: Sequence[str]) -> str:
    """Return a table in Markdown."""
    return "\n".join([markdown_row(head), f"| {' | '.join(['---'] * len(head))} |", *rows])


def real_files() -> str:
    """Return the counts of the example files of each measured commit, as `benchmarks/real_files.py` wrote them."""
    head = ["framework", "commit", "files", "plan", "of these, name what waits", "no complete run", "refused", "share"]
    return markdown_table(head, [_real_files_row(name, result) for name, result in _real_files()])


def newest_files() -> str:
    """Return how many example files of the newest measured commit of each framework plan and could be trained."""
    newest = dict(sorted(_real_files(), key=lambda pair: pair[1].get("date", "")))
    head = ["framework", "commit", "complete runs", "plan", "of these, can be trained", "name what waits"]
    return markdown_table(head, [_newest_row(title, newest[name]) for name, title in FRAMEWORKS.items()])


def _newest_row(framework: str, result: dict[str, Any]) -> str:
    planned, complete = _planned_and_complete(result)
    counts = result["counts"]
    commit = f"`{result['commit']}` {result['date']}"
    return markdown_row([framework, commit, complete, planned, counts.get("plans", 0), counts.get("waits", 0)])


def _real_files() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(RESULTS.glob("real_files*.json")):
        yield from sorted(json.loads(path.read_text()).items())


def _planned_and_complete(result: dict[str, Any]) -> tuple[int, int]:
    counts = result["counts"]
    planned = counts.get("plans", 0) + counts.get("waits", 0)
    return planned, result["files"] - counts.get("input", 0) - counts.get("no run", 0)


def _real_files_row(name: str, result: dict[str, Any]) -> str:
    """Return the counts of one checkout; the share is that of the files that are complete runs."""
    planned, complete = _planned_and_complete(result)
    waits, incomplete = result["counts"].get("waits", 0), result["files"] - complete
    framework = result.get("framework", name)
    repository = result.get("repository", load_releases(framework).repository)
    commit = f"`{result['commit']}`" if " " in result["commit"] else f"`{result['commit']}` {result.get('date', '')}"
    source = f"[{repository}](https://github.com/{repository}) {commit.strip()}"
    numbers = [result["files"], planned, waits, incomplete, complete - planned]
    return markdown_row([framework, source, *numbers, f"{planned / complete:.1%}"])


def project_files() -> str:
    """Return the outcomes of the files of other projects, as `benchmarks/project_files.py` compared them."""
    head = ["seed", "files", "projects", "equal", "different", "refused", "not derived or not composed"]
    head += ["unknown keys", "called typos"]
    names = ["project_files.json", "project_files_seed1.json", "project_files_seed7.json"]
    return markdown_table(head, [_project_files_row(name) for name in names])


def _project_files_row(name: str) -> str:
    result = json.loads((RESULTS / name).read_text())
    outcomes, files = result["outcomes"], result["files"]
    compared = [file for file in files if file["outcome"] not in NOT_COMPARED]
    of_framework = Counter(file.get("dialect") or _framework_of(file) for file in compared)
    parts = ", ".join(f"{number} {FRAMEWORKS[name]}" for name, number in of_framework.most_common())
    seed = f"[{result['seed']}](../benchmarks/results/{name}){REMARKS.get(result['seed'], '')}"
    numbers = [outcomes.get(outcome, 0) for outcome in ("equal", "different", "refused")]
    others = sum(outcomes.get(outcome, 0) for outcome in NOT_COMPARED)
    projects = len({file["project"] for file in compared})
    cells = [seed, f"{len(compared)} ({parts})", projects, *numbers, others]
    return markdown_row([*cells, result["unknown_keys"], result["called_typos"]])


def _framework_of(file: dict[str, Any]) -> str:
    """Return the framework of a file that is refused before its dialect is known: scripts are verl's."""
    if file["path"].endswith(".sh"):
        return "verl"
    return "rlinf" if "embodiment" in file["path"] or "RLinf" in file["project"] else "roll"
