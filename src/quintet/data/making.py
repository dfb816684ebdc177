"""Data sets that are made on the spot: verifiable tasks as Parquet files in verl's schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from quintet.data.files import made_whole
from quintet.data.processes import Processes, serve
from quintet.data.tasks import Problem, Task, make_task
from quintet.errors import ConfigError, MachineError

__all__ = ["SPLITS", "check_directory", "make_data", "write_rows"]

MODULE: Final = "quintet.data.making"
SPLITS: Final = ("train", "validation")
BLOCK: Final = 256
"""Problems that are asked for at a time."""
PATIENCE: Final = 10_000
"""Problems in a row that add nothing, at least, before a task is held to have no more; so many again for each two
that were found, for the last of a few are long in coming."""

Row = Mapping[str, Any]


def make_data(
    task: str,
    directory: Path,
    *,
    train: int,
    validation: int,
    seed: int = 0,
    processes: int = 1,
    options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> dict[str, Path]:
    """Write `train.parquet` and `validation.parquet` of a task; a split of no rows has no file.

    No question is in a split twice or in both, not even in other words (3 + 4, 4 + 3). The rows follow from task,
    options, sizes and `seed`, however many processes make them.

    Raises:
        ConfigError: an unknown task or option, or a task that hasn't so many questions.
        MachineError: a file is there already, or can't be written.
    """
    options = dict(options or {})
    # before any process: what is wrong with the options is told at once
    made = make_task(task, options)
    check_directory(directory, {"train": train, "validation": validation}, overwrite=overwrite)
    found = _distinct(_problems(made, task, options, seed, processes), train, validation, task)
    rows = {
        split: [_row(made, problem, split, index) for index, problem in enumerate(problems)]
        for split, problems in found.items()
    }
    return write_rows(directory, rows)


def check_directory(directory: Path, sizes: Mapping[str, int], *, overwrite: bool) -> None:
    """Refuse sizes that make nothing, and to write over what is there.

    Raises:
        ConfigError: all sizes are 0, or one is below.
        MachineError: a file of one of the splits is there, and `overwrite` is false.
    """
    if min(sizes.values()) < 0 or not any(sizes.values()):
        told = ", ".join(f"{split}={size}" for split, size in sizes.items())
        raise ConfigError(f"{told}: there is nothing to make", key="train", hint="ask for some rows: --train 1000")
    there = [path for split in sizes if (path := directory / f"{split}.parquet").exists()]
    if there and not overwrite:
        raise MachineError(f"{there[0]} is there already", "give another directory, or --overwrite to make it anew")


def write_rows(directory: Path, splits: Mapping[str, Sequence[Row]]) -> dict[str, Path]:
    """A Parquet file for each split that has rows, whole or not at all; one without rows loses its old file.

    Raises:
        MachineError: it can't be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    written = {}
    for split, rows in splits.items():
        path = directory / f"{split}.parquet"
        if not rows:
            path.unlink(missing_ok=True)
            continue
        table = pa.Table.from_pylist(list(rows))
        made_whole(path, lambda part, table=table: pq.write_table(table, part))  # type: ignore[misc]
        written[split] = path
    return written


def _row(task: Task, problem: Problem, split: str, index: int) -> Row:
    row = {
        "data_source": task.source,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": task.ability,
        "reward_model": {"style": "rule", "ground_truth": problem.truth},
        "extra_info": {"split": split, "index": index, **problem.about},
    }
    return row if problem.response is None else {**row, "response": problem.response}


def _distinct(problems: Iterable[Problem | None], train: int, validation: int, task: str) -> dict[str, list[Problem]]:
    """The first so many problems that differ: those held out first, and then others for training."""
    held: list[Problem] = []
    learned: list[Problem] = []
    texts, keys = set[str](), set[str]()
    idle = 0
    for problem in problems if train + validation else ():
        idle += 1
        chosen = held if len(held) < validation else learned
        if problem is not None and problem.question not in texts and (chosen is held or problem.key not in keys):
            texts.add(problem.question)
            chosen.append(problem)
            idle = 0
            if chosen is held:
                keys.add(problem.key)
        if len(held) == validation and len(learned) == train:
            return {"train": learned, "validation": held}
        if idle > PATIENCE + (len(texts) // 2):
            break
    raise ConfigError(
        f"{task}: only {len(held) + len(learned):,} questions that differ were found, not the {train + validation:,}"
        " that are asked for",
        key="train",
        value=train,
        hint="ask for fewer, or let the options allow more: more digits, terms or numbers",
    )


def _problems(task: Task, name: str, options: Mapping[str, Any], seed: int, processes: int) -> Iterator[Problem | None]:
    """Problem after problem, without end."""
    if processes < 2:
        number = 0
        while True:
            yield task.problem(seed, number)
            number += 1
    with Processes(MODULE, {"task": name, "options": options, "seed": seed}, processes) as workers:
        for block in workers.map({"first": start} for start in _starts()):
            yield from (None if made is None else Problem(**made) for made in block)


def _starts() -> Iterator[int]:
    start = 0
    while True:
        yield start
        start += BLOCK


def _prepare(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    task, seed = make_task(setup["task"], setup["options"]), setup["seed"]

    def block(request: Mapping[str, Any]) -> list[Any]:
        numbers = range(request["first"], request["first"] + BLOCK)
        problems = (task.problem(seed, number) for number in numbers)
        return [None if problem is None else asdict(problem) for problem in problems]

    return block


if __name__ == "__main__":
    serve(_prepare)
