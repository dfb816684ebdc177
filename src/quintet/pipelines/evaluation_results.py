"""Results of an evaluation: scored responses, their statistics by data source, and the files that have them."""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from quintet.config.composed import ComposedConfig
from quintet.config.yaml_writer import dump_config
from quintet.records import Failure
from quintet.tracking.atomic_files import translate_os_errors
from quintet.tracking.eval_statistics import Estimates, Sample, estimates, validation_metrics
from quintet.tracking.run_directory import RunDirectory

RESULTS, ANSWERS, CONFIG = "results.json", "answers.jsonl", "evaluation.yaml"


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics to compute: pass@k and maj@k for each k of `samples`, where a response with a score of at least
    `pass_threshold` is correct, and confidence intervals."""

    samples: tuple[int, ...] = (1, 2, 4, 8)
    pass_threshold: float = 1.0
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results by data source."""

    directory: Path
    statistics: Statistics
    sources: Mapping[str, Estimates]
    failures: Mapping[str, Mapping[str, int]]
    """Number of responses per source that could not be scored, by kind of failure."""
    metrics: Mapping[str, float]
    """Results under verl's metric names, such as `test_score/<source>`."""
    endpoint: Mapping[str, Any] | None = None
    """Endpoint that was evaluated, with its token counts; None for a model on disk."""

    @property
    def answers(self) -> int:
        return sum(estimate.answers for estimate in self.sources.values())

    @property
    def failed(self) -> int:
        return sum(sum(kinds.values()) for kinds in self.failures.values())

    def as_json(self) -> dict[str, Any]:
        """Return the content of `results.json`."""
        sources = {
            name: asdict(estimate) | {"failures": self.failures[name]} for name, estimate in self.sources.items()
        }
        return {
            "answers": self.answers,
            "failed": self.failed,
            "confidence": self.statistics.confidence,
            "pass_threshold": self.statistics.pass_threshold,
            "sources": sources,
            "metrics": dict(self.metrics),
            **({"endpoint": dict(self.endpoint)} if self.endpoint is not None else {}),
        }


@dataclass(slots=True)
class ResultWriter:
    """Writes scored responses in the order of their numbers, in whatever order they are scored."""

    file: IO[str]
    samples: list[Sample] = field(default_factory=list)
    failures: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _queue: list[tuple[int, Sample, str]] = field(default_factory=list)

    def add(self, number: int, sample: Sample, failure: Failure | None, shown: Mapping[str, Any]) -> None:
        """Add the result of that number; `shown` are further values of its line."""
        if failure is not None:
            self.failures[sample.source][failure.error_type] += 1
        line = json.dumps({**_line(sample, failure), **shown}, ensure_ascii=False)
        heapq.heappush(self._queue, (number, sample, line))
        while self._queue and self._queue[0][0] == len(self.samples):
            _, next_sample, text = heapq.heappop(self._queue)
            self.samples.append(next_sample)
            with translate_os_errors(self.file.name):
                self.file.write(f"{text}\n")


def _line(sample: Sample, failure: Failure | None) -> dict[str, Any]:
    return {
        "source": sample.source,
        "prompt": sample.prompt,
        "score": sample.score,
        "reward_components": {
            name: value if math.isfinite(value) else None for name, value in sample.reward_components.items()
        },
        "extracted_answer": sample.extracted_answer,
        "failure": None if failure is None else asdict(failure),
    }


@contextmanager
def open_results(composed: ComposedConfig) -> Iterator[tuple[RunDirectory, ResultWriter]]:
    """Create and lock the run directory; the file with the results gets its name when it is complete."""
    directory = RunDirectory.create_for(composed)
    with directory.lock():
        config = dump_config(composed).partition("\n")[2]
        directory.write_text(CONFIG, f"# Resolved configuration of this evaluation.\n{config}")
        directory.write_keys(composed)
        part = directory.path / f".{ANSWERS}.partial"
        with translate_os_errors(part):
            # a policy's bytes may decode to lone surrogates, which UTF-8 cannot encode
            file = part.open("w", encoding="utf-8", errors="backslashreplace")
        try:
            with file:
                yield directory, ResultWriter(file)
                with translate_os_errors(part):
                    file.flush()
            with translate_os_errors(part):
                part.replace(directory.path / ANSWERS)
        finally:
            part.unlink(missing_ok=True)


def finish_results(
    directory: RunDirectory, writer: ResultWriter, statistics: Statistics, endpoint: Mapping[str, Any] | None = None
) -> Evaluation:
    """Compute the statistics of each source, and write them."""
    sources: dict[str, list[Sample]] = defaultdict(list)
    for sample in writer.samples:
        sources[sample.source].append(sample)
    by_source = {
        name: estimates(
            samples, statistics.samples, confidence=statistics.confidence, pass_threshold=statistics.pass_threshold
        )
        for name, samples in sorted(sources.items())
    }
    means = {f"test_score/{name}": estimate.score.mean for name, estimate in by_source.items()}
    failures = {name: dict(sorted(writer.failures[name].items())) for name in by_source}
    metrics = means | validation_metrics(writer.samples)
    evaluation = Evaluation(directory.path, statistics, by_source, failures, metrics, endpoint)
    directory.write_text(RESULTS, json.dumps(evaluation.as_json(), indent=1, ensure_ascii=False) + "\n")
    return evaluation
