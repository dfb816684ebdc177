"""Generation of datasets of verifiable tasks, as Parquet files in verl's schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from quintet.data.data_files import write_atomically
from quintet.data.tasks.task import Problem, Task, build_task
from quintet.data.worker_pool import WorkerPool
from quintet.errors import ConfigError, MachineError

SPLITS: Final = ("train", "validation")
PROBLEMS_PER_REQUEST: Final = 256
"""Problems per request to a worker."""
MAX_IDLE_PROBLEMS: Final = 10_000
"""Consecutive problems without a new question after which a task is considered exhausted, plus half the number of
questions so far: the last questions of a small task take long to occur."""

Row = Mapping[str, Any]


def generate_dataset(
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
    """Generate a task's problems and write `train.parquet` and `validation.parquet`; empty splits have no file.

    Questions are distinct within a split, and no training problem is equivalent to a validation problem (3 + 4, 4 + 3).
    Rows depend on task, options, sizes and `seed`, not on the number of processes.

    Raises:
        ConfigError: the task or an option is unknown, or the task has too few distinct questions.
        MachineError: a file exists already, or cannot be written.
    """
    options = dict(options or {})
    # before starting processes, to report invalid options immediately
    task_instance = build_task(task, options)
    check_directory(directory, {"train": train, "validation": validation}, overwrite=overwrite)
    problems_by_split = _select_distinct(
        _iter_problems(task_instance, task, options, seed, processes), train, validation, task
    )
    rows = {
        split: [_row(task_instance, problem, split, index) for index, problem in enumerate(problems)]
        for split, problems in problems_by_split.items()
    }
    return write_rows(directory, rows)


def check_directory(directory: Path, sizes: Mapping[str, int], *, overwrite: bool) -> None:
    """Check the sizes of the splits, and that no file would be overwritten.

    Raises:
        ConfigError: all sizes are 0, or one is negative.
        MachineError: a file of a split exists, and `overwrite` is false.
    """
    if min(sizes.values()) < 0 or not any(sizes.values()):
        sizes_text = ", ".join(f"{split}={size}" for split, size in sizes.items())
        raise ConfigError(
            f"{sizes_text}: no rows to generate", key="train", hint="request rows, for example --train 1000"
        )
    existing = [path for split in sizes if (path := directory / f"{split}.parquet").exists()]
    if existing and not overwrite:
        raise MachineError(f"{existing[0]} exists already", "use another directory, or --overwrite to replace it")


def write_rows(directory: Path, splits: Mapping[str, Sequence[Row]]) -> dict[str, Path]:
    """Write a Parquet file per non-empty split atomically; the files of empty splits are deleted.

    Raises:
        MachineError: a file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = {}
    for split, rows in splits.items():
        path = directory / f"{split}.parquet"
        if not rows:
            path.unlink(missing_ok=True)
            continue
        table = pa.Table.from_pylist(list(rows))
        write_atomically(path, lambda temporary, table=table: pq.write_table(table, temporary))  # type: ignore[misc]
        paths[split] = path
    return paths


def _row(task: Task, problem: Problem, split: str, index: int) -> Row:
    row = {
        "data_source": task.source,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": task.ability,
        "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
        "extra_info": {"split": split, "index": index, **problem.extra_info},
    }
    return row if problem.response is None else {**row, "response": problem.response}


def _select_distinct(
    problems: Iterable[Problem | None], train: int, validation: int, task: str
) -> dict[str, list[Problem]]:
    """Select the first distinct problems, validation problems first."""
    validation_problems: list[Problem] = []
    train_problems: list[Problem] = []
    questions, validation_keys = set[str](), set[str]()
    num_idle = 0
    for problem in problems if train + validation else ():
        num_idle += 1
        target = validation_problems if len(validation_problems) < validation else train_problems
        if (
            problem is not None
            and problem.question not in questions
            and (target is validation_problems or problem.key not in validation_keys)
        ):
            questions.add(problem.question)
            target.append(problem)
            num_idle = 0
            if target is validation_problems:
                validation_keys.add(problem.key)
        if len(validation_problems) == validation and len(train_problems) == train:
            return {"train": train_problems, "validation": validation_problems}
        if num_idle > MAX_IDLE_PROBLEMS + (len(questions) // 2):
            break
    raise ConfigError(
        f"{task}: only {len(questions):,} distinct questions were found, {train + validation:,} were requested",
        key="train",
        value=train,
        hint="request fewer, or change the options: more digits, terms or numbers",
    )


def _iter_problems(
    task: Task, name: str, options: Mapping[str, Any], seed: int, processes: int
) -> Iterator[Problem | None]:
    """Yield problems without end."""
    if processes < 2:
        number = 0
        while True:
            yield task.problem(seed, number)
            number += 1
    with WorkerPool(_create_handler, {"task": name, "options": options, "seed": seed}, processes) as workers:
        for block in workers.map({"first": start} for start in _iter_block_starts()):
            yield from (None if fields is None else Problem(**fields) for fields in block)


def _iter_block_starts() -> Iterator[int]:
    start = 0
    while True:
        yield start
        start += PROBLEMS_PER_REQUEST


def _create_handler(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    task, seed = build_task(setup["task"], setup["options"]), setup["seed"]

    def handle(request: Mapping[str, Any]) -> list[Any]:
        numbers = range(request["first"], request["first"] + PROBLEMS_PER_REQUEST)
        problems = (task.problem(seed, number) for number in numbers)
        return [None if problem is None else asdict(problem) for problem in problems]

    return handle
