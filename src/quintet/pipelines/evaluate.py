"""Evaluation: stored answers are judged, or a model answers first; what they come to goes into the run's directory."""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from quintet.config import Composed, dump_config
from quintet.config.native import DataConfig, EvaluationConfig, Experiment, RewardConfig
from quintet.data.questions import RowReader
from quintet.data.source import open_rows
from quintet.envs.mixture import open_starts, worlds_of
from quintet.errors import ConfigError, MachineError, nearest
from quintet.policies.adapters import add_lora, merge
from quintet.policies.causal_lm import load_model, load_tokenizer
from quintet.records import Answer, Failure, Trajectory, Verdict
from quintet.rollout.agent_loop import AgentLoop, Game, Sampling, derive_seed
from quintet.rollout.dialogue import ChatFormat
from quintet.rollout.draws import check_tokens, validation_prompts, validation_sampling
from quintet.rollout.endpoint import UNLIMITED, EndpointEngine, EndpointSettings, message_tokenizer, without_tokens
from quintet.rollout.engine import ENGINES, Engine
from quintet.rollout.prompts import PromptLoop
from quintet.rollout.rules import rules_of
from quintet.rollout.supervision import Supervised
from quintet.runtime.device import beside_engine
from quintet.runtime.engines import engine_setup
from quintet.runtime.judging import open_judge
from quintet.runtime.local import end_tokens
from quintet.runtime.memory import keep_freed_memory
from quintet.tracking.estimates import Estimates, Sample, estimates, validation_metrics
from quintet.tracking.progress import open_progress
from quintet.tracking.run_directory import RunDirectory, machine_errors
from quintet.tracking.trajectories import write_trajectories
from quintet.training.checkpoint import find_checkpoint, open_checkpoint

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Evaluation",
    "Found",
    "Measured",
    "config_beside",
    "evaluate_model",
    "evaluate_stored",
    "find_model",
    "model_of",
]

RESULTS, ANSWERS, GAMES, CONFIG = "results.json", "answers.jsonl", "games.jsonl", "evaluation.yaml"
TOGETHER = 4096
"""Answers that are judged, or games that are played, at a time: what is held in memory."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What is computed: pass@k and maj@k for these k, from which accuracy an answer is right, and how sure the
    intervals are."""

    samples: tuple[int, ...] = (1, 2, 4, 8)
    right_from: float = 1.0
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was found, by data source."""

    directory: Path
    measured: Measured
    sources: Mapping[str, Estimates]
    failures: Mapping[str, Mapping[str, int]]
    """How many answers of each source couldn't be judged, by the kind of failure."""
    metrics: Mapping[str, float]
    """The same under verl's names, `test_score/<source>` among them."""
    endpoint: Mapping[str, Any] | None = None
    """Which endpoint was asked, and what it counted; null where a model of ours answered."""

    @property
    def answers(self) -> int:
        return sum(found.answers for found in self.sources.values())

    @property
    def failed(self) -> int:
        return sum(sum(kinds.values()) for kinds in self.failures.values())

    def as_json(self) -> dict[str, Any]:
        """What `results.json` holds."""
        sources = {name: asdict(found) | {"failures": self.failures[name]} for name, found in self.sources.items()}
        return {
            "answers": self.answers,
            "failed": self.failed,
            "confidence": self.measured.confidence,
            "right_from": self.measured.right_from,
            "sources": sources,
            "metrics": dict(self.metrics),
            **({"endpoint": dict(self.endpoint)} if self.endpoint is not None else {}),
        }


@dataclass(slots=True)
class _Record:
    """Answers as they are judged: written in the order of their numbers, whatever order they come in."""

    file: IO[str]
    samples: list[Sample] = field(default_factory=list)
    failures: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _waiting: list[tuple[int, Sample, str]] = field(default_factory=list)

    def add(self, number: int, sample: Sample, failure: Failure | None, shown: Mapping[str, Any]) -> None:
        """Take the answer of that number; `shown` is what its line holds besides its score."""
        if failure is not None:
            self.failures[sample.source][failure.kind] += 1
        line = json.dumps({**_line(sample, failure), **shown}, ensure_ascii=False)
        heapq.heappush(self._waiting, (number, sample, line))
        while self._waiting and self._waiting[0][0] == len(self.samples):
            _, known, text = heapq.heappop(self._waiting)
            self.samples.append(known)
            with machine_errors(self.file.name):
                self.file.write(f"{text}\n")


def _line(sample: Sample, failure: Failure | None) -> dict[str, Any]:
    return {
        "source": sample.source,
        "prompt": sample.prompt,
        "score": sample.score,
        "parts": {name: value if math.isfinite(value) else None for name, value in sample.parts.items()},
        "predicted": sample.predicted,
        "failure": None if failure is None else asdict(failure),
    }


@contextmanager
def _recording(composed: Composed) -> Iterator[tuple[RunDirectory, _Record]]:
    """The run's directory, made and locked, with a file for answers that appears once it is whole."""
    directory = RunDirectory.made(composed)
    with directory.lock():
        told = dump_config(composed).partition("\n")[2]
        directory.write_text(CONFIG, f"# Resolved configuration of this evaluation.\n{told}")
        part = directory.path / f".{ANSWERS}.partial"
        with machine_errors(part):
            # a policy's bytes may decode to lone surrogates, which UTF-8 can't hold
            file = part.open("w", encoding="utf-8", errors="backslashreplace")
        try:
            with file:
                yield directory, _Record(file)
                with machine_errors(part):
                    file.flush()
            with machine_errors(part):
                part.replace(directory.path / ANSWERS)
        finally:
            part.unlink(missing_ok=True)


def _finish(
    directory: RunDirectory, record: _Record, measured: Measured, endpoint: Mapping[str, Any] | None = None
) -> Evaluation:
    """Estimates of each source, written down."""
    sources: dict[str, list[Sample]] = defaultdict(list)
    for sample in record.samples:
        sources[sample.source].append(sample)
    found = {
        name: estimates(samples, measured.samples, confidence=measured.confidence, right_from=measured.right_from)
        for name, samples in sorted(sources.items())
    }
    means = {f"test_score/{name}": one.score.mean for name, one in found.items()}
    failures = {name: dict(sorted(record.failures[name].items())) for name in found}
    metrics = means | validation_metrics(record.samples)
    evaluation = Evaluation(directory.path, measured, found, failures, metrics, endpoint)
    directory.write_text(RESULTS, json.dumps(evaluation.as_json(), indent=1, ensure_ascii=False) + "\n")
    return evaluation


def evaluate_stored(composed: Composed, console: Console) -> Evaluation:
    """Judge the answers of `evaluation.path` by `reward`, or by `evaluation.function`.

    Raises:
        ConfigError: nothing to evaluate is named, or the file hasn't the columns.
        MachineError: a file can't be read or written.
    """
    config = composed.experiment
    stored = config.evaluation
    if stored is None:
        raise ConfigError(
            "no stored answers to evaluate",
            key="evaluation.path",
            hint="set evaluation.path to their file, or have a model answer: quintet eval MODEL --data FILE, or a "
            "configuration with validation.only=true",
        )
    answers = _Stored(stored, questions_matter=_asks_a_model(config.reward))
    with _recording(composed) as (directory, record):
        judging = config.model_copy(update={"reward": _reward(config)})
        judge = open_judge(judging, Path(config.policy.path or "policy"))
        progress = open_progress(console)
        with closing(judge), progress.phase("judging", len(answers), unit="prompt") as phase:
            waiting: dict[int, Answer] = {}

            def take(verdicts: Iterable[Verdict]) -> None:
                for verdict in verdicts:
                    _add_stored(record, waiting.pop(verdict.id), verdict)

            for row in range(len(answers)):
                for answer in answers.of(row):
                    waiting[answer.id] = answer
                    judge.submit(answer)
                take(judge.ready() if len(waiting) < TOGETHER else judge.drain())
                phase.advance()
            take(judge.drain())
        return _finish(directory, record, Measured(stored.samples, stored.right_from, stored.confidence))


def _add_stored(record: _Record, answer: Answer, verdict: Verdict) -> None:
    question = answer.question
    sample = Sample(
        question.source or "prompts", str(question.id), verdict.score, dict(verdict.parts), verdict.predicted
    )
    record.add(answer.id, sample, verdict.failure, {"response": answer.text})


def _reward(config: Experiment) -> RewardConfig:
    """What judges: the reward section, with the evaluation's own function where it names one."""
    reward = config.reward or RewardConfig(function_arguments={})
    function = config.evaluation.function if config.evaluation else None
    return reward if function is None else reward.model_copy(update={"function": function})


def _asks_a_model(reward: RewardConfig | None) -> bool:
    return reward is not None and (reward.model is not None or reward.judge is not None)


class _Stored:
    """Rows of questions with their answers, numbered through."""

    def __init__(self, config: EvaluationConfig, *, questions_matter: bool) -> None:
        """`questions_matter` has rows without a prompt refused; rules need none."""
        self._column = config.response_key
        self._prompt = None if questions_matter else config.prompt_key
        self._rows, _ = open_rows([config.path], "evaluation.path")
        self._reader = RowReader(
            DataConfig(prompt_key=config.prompt_key, source_key=config.source_key, truth_key=config.truth_key)
        )
        self._answers = 0

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, number: int) -> Iterator[Answer]:
        """The answers of a row; rows are to be asked for in their order.

        Raises:
            ConfigError: a column isn't there, or holds something else.
        """
        row, place = dict(self._rows[number]), self._rows.place(number)
        texts = self._texts(row.pop(self._column, None), row, place)
        if self._prompt is not None and row.get(self._prompt) is None:
            row[self._prompt] = ""
        question = self._reader.read(row, number, place)
        for text in texts:
            yield Answer(self._answers, question, text, tokens=0)
            self._answers += 1

    def _texts(self, value: object, row: Mapping[str, Any], place: str) -> Sequence[str]:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
            return texts
        if value is None:
            close = nearest(self._column, row)
            told = f"{place} has no such column"
            hint = (f"did you mean {close}? " if close else "") + f"its columns are {', '.join(row)}"
        else:
            told, hint = f"{place} holds {value!r:.60}", "it takes a list of texts, or one text"
        key = "evaluation.response_key"
        raise ConfigError(f"{key} = {self._column}: {told}", key=key, value=self._column, source=place, hint=hint)


@dataclass(frozen=True, slots=True)
class Found:
    """A model on disk, and the configuration of the run that made it, where that lies beside it."""

    policy: Path
    config: Path | None = None


def find_model(place: str) -> Found:
    """The model at a path: a Hugging Face directory, a `global_step_N` directory, or a run's, whose last good
    checkpoint counts.

    Raises:
        MachineError: there is none, or the checkpoint is damaged.
    """
    path = Path(place).expanduser()
    if (path / "config.json").is_file():
        return Found(path)
    if (path / "hf").is_dir():
        return Found(open_checkpoint(path).directory / "hf", _beside(path.resolve().parent.parent))
    if (path / "checkpoints").is_dir():
        damaged: dict[Path, str] = {}
        checkpoint = find_checkpoint(path / "checkpoints", damaged.__setitem__)
        if checkpoint is not None:
            return Found(checkpoint.directory / "hf", _beside(path))
        faults = "; ".join(f"{one.name}: {why}" for one, why in damaged.items()) or "there is none yet"
        raise MachineError(f"no whole checkpoint in {path / 'checkpoints'} ({faults})", "name another run")
    raise MachineError(
        f"no model at {place}", "name a directory with config.json and weights, a global_step_N directory, or a run's"
    )


def model_of(config: Experiment) -> Path:
    """The model of a configuration: the checkpoint that `resume` names, `policy.path`, or the last good checkpoint of
    the run of that name.

    Raises:
        ConfigError: there is none of these.
        MachineError: the checkpoint is damaged.
    """
    if config.resume not in ("auto", "never"):
        return find_model(config.resume).policy
    if config.policy.path is not None:
        return Path(config.policy.path)
    run = RunDirectory.of(config)
    if config.resume == "auto" and run.checkpoints.is_dir():
        return find_model(str(run.path)).policy
    raise ConfigError(
        f"no model to evaluate: policy.path is null, and there is no checkpoint in {run.checkpoints}",
        key="policy.path",
        hint="name a model directory (policy.path=…, policy.preset=null), or have quintet train make one first",
    )


def config_beside(place: Path) -> Path | None:
    """The configuration of the run whose directory that is, or whose checkpoint lies there; null for anything else."""
    if (place / "config.json").is_file():
        return None
    if (place / "hf").is_dir():
        return _beside(place.resolve().parent.parent)
    return _beside(place) if (place / "checkpoints").is_dir() else None


def _beside(run: Path) -> Path | None:
    config = RunDirectory(run).config
    return config if config.is_file() else None


def evaluate_model(
    composed: Composed, measured: Measured, console: Console, endpoint: EndpointSettings | None = None
) -> Evaluation:
    """Have `policy.path`, or the model behind an endpoint, answer the held-out questions of `data`, or play held-out
    games of its worlds: `validation.sampling.samples` times each, as `validation.sampling` says.

    Raises:
        ConfigError: the files, the world or the rules aren't as the configuration says, or an endpoint can't do so.
        MachineError: the model can't be read, or a file can't be written.
    """
    config = composed.experiment
    if endpoint is not None:
        check_for_endpoint(config)
    with _recording(composed) as (directory, record):
        player = _Player.of(config, endpoint)
        samples = config.validation.sampling.samples
        progress = open_progress(console)
        kept: list[Trajectory] = []
        with closing(player), progress.phase("playing", len(player.starts) * samples, unit="game") as phase:
            for trajectory in player.play(samples):
                counted = trajectory if endpoint is None else without_tokens(trajectory)
                _add_played(record, counted, trajectory.group * samples + trajectory.sample, whose=endpoint)
                if config.world.name != "prompts":
                    kept.append(counted)
                phase.advance()
        if kept:
            kept.sort(key=lambda t: (t.group, t.sample))
            write_trajectories(directory.path / GAMES, 0, "validation", kept)
        return _finish(directory, record, measured, player.told(endpoint))


def check_for_endpoint(config: Experiment) -> None:
    """
    Raises:
        ConfigError: something is asked for that needs the policy's tokens, which an endpoint doesn't show.
    """
    rollout, data, reward = config.rollout, config.data, config.reward
    wanted = {
        "rollout.max_prompt_tokens": rollout.max_prompt_tokens != UNLIMITED,
        "rollout.max_start_tokens": rollout.max_start_tokens is not None,
        "rollout.max_observation_tokens": rollout.max_observation_tokens is not None,
        "rollout.end_token": rollout.end_token is not None,
        "rollout.engine": rollout.engine != "hf",
        **{f"{one.key}.max_tokens": getattr(one.config, "max_tokens", None) is not None for one in config.played},
        "data.filter_long_prompts": data is not None and data.filter_long_prompts,
        "data.template": data is not None and data.template is not None,
        "reward.overlong": reward is not None and reward.overlong is not None,
        "reward.model.path": reward is not None and reward.model is not None and reward.model.path is None,
    }
    for key in (key for key, asked in wanted.items() if asked):
        raise ConfigError(
            f"{key} concerns the policy's own tokens, and an endpoint shows none", key=key, hint=f"leave {key} out"
        )


def _add_played(record: _Record, trajectory: Trajectory, number: int, *, whose: EndpointSettings | None = None) -> None:
    parts = dict(trajectory.parts) or {"acc": float(trajectory.success)}
    sample = Sample(trajectory.world, str(trajectory.seed), trajectory.reward, parts, trajectory.predicted)
    shown = {
        "response": trajectory.turns[-1].text if trajectory.turns else "",
        "sample": trajectory.sample,
        "outcome": trajectory.outcome.value,
        "turns": len(trajectory.turns),
        "tokens": trajectory.response_tokens if whose is None else None,
    }
    record.add(number, sample, trajectory.failure, shown)


@dataclass(frozen=True, slots=True)
class _Player:
    """A model, what it is asked, and who judges."""

    games: AgentLoop | PromptLoop
    starts: Sequence[int]
    sampling: Sampling
    engine: Engine
    together: int
    """Starts that are played at a time."""

    @classmethod
    def of(cls, config: Experiment, endpoint: EndpointSettings | None = None) -> _Player:
        policy = _loaded(config) if endpoint is None else _behind(endpoint)
        sampling = validation_sampling(config, derive_seed(config.seed, "evaluation"))
        if config.world.name == "prompts":
            return _asked(config, policy, sampling)
        engine = policy.open(config.rollout.max_prompt_tokens)
        starts = open_starts(config).held_out()
        # every failure is shown in the results: none ends an evaluation
        rules = [one.forgiving() for one in rules_of(config)]
        chat = ChatFormat.under(config.rollout, policy.tokenizer, policy.ends)
        games = AgentLoop.playing(engine, chat, worlds_of(config), rules)
        return cls(games, starts, sampling, engine, validation_prompts(config, len(starts)))

    def play(self, samples: int) -> Iterator[Trajectory]:
        """All games, `samples` from each start, `TOGETHER` at a time at most."""
        games = [Game(start, group, sample) for group, start in enumerate(self.starts) for sample in range(samples)]
        size = min(TOGETHER, self.together * samples)
        for first in range(0, len(games), size):
            yield from self.games.play(games[first : first + size], self.sampling)

    def told(self, endpoint: EndpointSettings | None) -> dict[str, Any] | None:
        """Of an endpoint, what it counted."""
        if endpoint is None or not isinstance(self.engine, EndpointEngine):
            return None
        return {"url": endpoint.url, "model": endpoint.model, **self.engine.counts}

    def close(self) -> None:
        """Let go of processes, of worlds and of the judge, and of the engine."""
        self.games.close()
        self.engine.close()


@dataclass(frozen=True, slots=True)
class _Policy:
    """What answers."""

    directory: Path
    tokenizer: Any
    ends: tuple[int, ...]
    """Tokens that end an answer."""
    open: Callable[[int], Engine]
    """The engine, with room for prompts of so many tokens."""


def _loaded(config: Experiment) -> _Policy:
    """The model at `policy.path`."""
    keep_freed_memory()
    torch.set_num_threads(config.training.threads or torch.get_num_threads())
    directory, trusted = Path(str(config.policy.path)), config.policy.trust_remote_code
    model = load_model(directory, trust_remote_code=trusted, overrides=config.policy.overrides)
    adapted = config.policy.lora if config.policy.lora and config.policy.lora.path else None
    if adapted:
        add_lora(model, adapted)
        merge(model)
    beside_engine(model, config)
    tokenizer = load_tokenizer(
        config.policy.tokenizer or directory,
        trust_remote_code=trusted or config.policy.trust_tokenizer_code,
        fast=config.policy.fast_tokenizer,
    )

    check_tokens(config, model.config.vocab_size)

    def opened(prompt_tokens: int) -> Engine:
        needed = prompt_tokens + config.rollout.max_response_tokens
        context = min(needed, config.rollout.engine_options.max_model_tokens or needed)
        setup = engine_setup(config, directory, model, tokenizer, context)
        opening = ENGINES.get(config.rollout.engine).load()
        engine = Supervised(lambda: opening(setup), model.named_parameters)
        if adapted:  # an engine may have read the model's own files
            engine.load_weights(0, model.named_parameters())
        return engine

    return _Policy(directory, tokenizer, end_tokens(tokenizer, model), opened)


def _behind(endpoint: EndpointSettings) -> _Policy:
    """The model behind an endpoint."""
    tokenizer = message_tokenizer()
    ends = (int(tokenizer.eos_token_id),)
    return _Policy(Path("policy"), tokenizer, ends, lambda _: EndpointEngine(endpoint, tokenizer))


def _asked(config: Experiment, policy: _Policy, sampling: Sampling) -> _Player:
    """The held-out questions, and who has them answered; the engine makes room for the longest."""
    from quintet.data.dataset import Questions

    if config.data is None:
        raise ConfigError("no questions to ask", key="data", hint="name files: data.validation_files")
    limit = config.rollout.max_prompt_tokens
    questions = Questions.of(config.data, policy.tokenizer, limit, "validation", config.seed)
    rows = range(len(questions))
    engine = policy.open(max(len(questions.prompt(row)) for row in rows))
    judge = open_judge(config, policy.directory)
    # every failure is shown in the results: none ends an evaluation
    loop = PromptLoop(
        engine, policy.tokenizer, questions, judge, config.rollout, ends=policy.ends, max_failed_share=1.0
    )
    return _Player(loop, rows, sampling, engine, validation_prompts(config, len(rows)))
