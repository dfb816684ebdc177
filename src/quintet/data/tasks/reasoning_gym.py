"""Problems of reasoning-gym's generators (Open-Thought 2025), stored with the data that its scoring needs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from quintet.data.tasks.task import REASONING_GYM, Problem, TaskOptions, format_response, parse_options
from quintet.errors import ConfigError, did_you_mean

PROBLEMS_PER_DATASET: Final = 1000
"""Size of the datasets created by a generator; some generators compute all problems at creation."""
RESERVED_OPTIONS: Final = ("size", "seed")
"""Options of all generators that are set here."""


class ReasoningGymTask:
    """Task of a reasoning-gym generator; options that are not in `TaskOptions` are passed to it.

    The ground truth of a row is the entry as JSON: `question`, `answer` and `metadata`, whose `source_dataset` names
    the generator, as required by `reasoning_gym.get_score_answer_fn(name)(answer, entry)`.
    """

    ability = "reasoning"

    def __init__(self, options: Mapping[str, Any]) -> None:
        task_options = {name: value for name, value in options.items() if name in TaskOptions.model_fields}
        generator_options = {
            name: value for name, value in options.items() if name not in task_options and name != "generator"
        }
        self._options = parse_options(TaskOptions, task_options, REASONING_GYM)
        self._name = _check_generator(options.get("generator"))
        self._generator_options = generator_options
        self._cached_dataset: tuple[tuple[int, int], Any] | None = None
        self.source = f"{REASONING_GYM}/{self._name}"
        self._dataset(0, 0)

    def problem(self, seed: int, number: int) -> Problem | None:
        dataset_index, index = divmod(number, PROBLEMS_PER_DATASET)
        entry = self._dataset(seed, dataset_index)[index]
        ground_truth = json.dumps(entry, default=_to_json)
        if number == 0:
            self._check_serializable(entry, ground_truth)
        answer = entry["answer"]
        working = entry["metadata"].get("answer_cot") if self._options.style == "worked" else None
        return Problem(
            question=f"{entry['question'].rstrip()}\n{self._options.instruction}".rstrip(),
            ground_truth=ground_truth,
            key=entry["question"],
            response=None if answer is None else format_response(str(answer), working),
            extra_info={"generator": self._name},
        )

    def _dataset(self, seed: int, dataset_index: int) -> Any:
        """Return the generator's dataset for a hashed seed.

        reasoning-gym seeds a problem by the sum of seed and number, so adjacent seeds would share all problems but one.
        """
        if self._cached_dataset is None or self._cached_dataset[0] != (seed, dataset_index):
            import reasoning_gym

            dataset_seed = zlib.crc32(f"{self._name}/{seed}/{dataset_index}".encode())
            try:
                dataset = reasoning_gym.create_dataset(
                    self._name, seed=dataset_seed, size=PROBLEMS_PER_DATASET, **self._generator_options
                )
            except (TypeError, ValueError, AssertionError) as error:
                raise self._options_error(error) from error
            self._cached_dataset = (seed, dataset_index), dataset
        return self._cached_dataset[1]

    def _options_error(self, error: Exception) -> ConfigError:
        from reasoning_gym.factory import DATASETS

        valid_options = [field.name for field in fields(DATASETS[self._name][1]) if field.name not in RESERVED_OPTIONS]
        unknown = next((name for name in self._generator_options if name not in valid_options), None)
        suggestion = did_you_mean(unknown or "", valid_options, "{}")
        hint = f"{suggestion} valid options: {', '.join(valid_options)}".lstrip()
        message = str(error) if unknown is None else f"unknown option {unknown}"
        return ConfigError(f"{REASONING_GYM}:{self._name}: {message}", key=unknown, hint=hint)

    def _check_serializable(self, entry: Mapping[str, Any], ground_truth: str) -> None:
        """Raise if the score of the answer changes when the entry is stored as JSON."""
        import reasoning_gym

        score_answer = reasoning_gym.get_score_answer_fn(self._name)
        before, after = (
            score_answer(entry["answer"], stored_entry) for stored_entry in (entry, json.loads(ground_truth))
        )
        if before != after:
            message = f"{REASONING_GYM}:{self._name}: the data for its scoring cannot be stored as JSON"
            raise ConfigError(message, value=self._name, hint="choose another generator")


def _check_generator(name: str | None) -> str:
    from reasoning_gym.factory import DATASETS

    if name in DATASETS:
        return str(name)
    suggestion = did_you_mean(name or "", DATASETS, f"{REASONING_GYM}:{{}}")
    hint = suggestion or f"generators: {', '.join(sorted(DATASETS))}"
    message = (
        f"{REASONING_GYM} has no generator {name}"
        if name
        else f"{REASONING_GYM} requires a generator, for example chain_sum"
    )
    raise ConfigError(message, value=name, hint=hint)


def _to_json(value: Any) -> Any:
    """Convert numpy numbers and arrays and sets to JSON data; other objects to text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
