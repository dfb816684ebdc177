"""`quintet eval`: stored answers, a model that answers first, or the model of a configuration that only validates."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.cli.configuration import ALONE, NATIVE, compose
from quintet.config import Composed
from quintet.config.native import DataConfig
from quintet.config.source import COMMAND_LINE, read_file
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from quintet.pipelines.evaluate import Evaluation, Found, Measured
    from quintet.rollout.endpoint import EndpointSettings
    from quintet.tracking.estimates import Estimate, Estimates

__all__ = ["Asked", "run"]

ANSWER_TOKENS, PROMPT_TOKENS = 512, 8192
"""Of a model that comes without the configuration of a run, where the command doesn't say."""
COLUMNS = ("kind", "prompt_key", "messages_key", "response_key", "truth_key", "source_key")
"""Keys that say how rows of conversations look, and nothing of questions."""
ENDPOINT = ("endpoint_model", "endpoint_key", "endpoint_concurrent", "endpoint_retries", "endpoint_timeout")
"""Options that say how an endpoint is asked."""
LIMIT = "rollout.max_prompt_tokens"
MEMORY_SHARE = 0.5
"""Of the machine's memory, for that model and its cache."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a model is asked, and how. What is as it is by default counts as not said."""

    data: str | None = None
    """File of questions."""
    world: str | None = None
    samples: int = 1
    """Answers to each question, or games from each start."""
    temperature: float | None = None
    """null is greedy for one sample, and 1 for several."""
    max_tokens: int | None = None
    limit: int | None = None
    """Questions at most."""
    games: int = 256
    """Start states."""
    confidence: float = 0.95
    """Of the intervals."""
    name: str | None = None
    output_dir: str = "runs"
    endpoint: str | None = None
    """Address of the endpoint that answers in place of a model."""
    endpoint_model: str | None = None
    """Which of its models."""
    endpoint_key: str = "OPENAI_API_KEY"
    """Environment variable with its key."""
    endpoint_concurrent: int = 16
    """Requests under way at a time."""
    endpoint_retries: int = 2
    endpoint_timeout: float = 300.0
    """Seconds for one reply."""

    def settings(self) -> EndpointSettings | None:
        """Of the endpoint that answers; null where a model does.

        Raises:
            ConfigError: it isn't said which of its models, or it is said of no endpoint.
        """
        if self.endpoint is None:
            for option in self.said(*ENDPOINT):
                raise ConfigError(f"{option}: of which endpoint?", key=option, hint="--endpoint http://…/v1")
            return None
        if self.endpoint_model is None:
            raise ConfigError("--endpoint: which of its models?", key="--endpoint-model", hint="--endpoint-model NAME")
        from quintet.rollout.endpoint import EndpointSettings

        settings = EndpointSettings(
            self.endpoint,
            self.endpoint_model,
            self.endpoint_key,
            self.endpoint_concurrent,
            self.endpoint_retries,
            self.endpoint_timeout,
        )
        settings.check()
        return settings

    def said(self, *names: str) -> Iterator[str]:
        """Those of the options that somebody gave, as the command line spells them."""
        defaults = {field.name: field.default for field in fields(self)}
        yield from (f"--{name.replace('_', '-')}" for name in names if getattr(self, name) != defaults[name])


def run(
    what: str | None,
    overrides: list[str],
    dialect: str | None,
    unknown_keys: str,
    asked: Asked,
    *,
    as_json: bool = False,
) -> int:
    """Evaluate and show what was found; gives the exit status, 1 where most answers couldn't be judged.

    Raises:
        ConfigError: something is wrong in what was asked.
        MachineError: a model or a file can't be read or written.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from rich.console import Console

    # --json has stdout to itself
    console = Console(stderr=as_json)
    asked.settings()
    own = _own_questions(what) if asked.data is None and asked.world is None else None
    if asked.data is None and asked.world is None and own is None:
        _check_configured(what, asked)
        _check_limits(overrides, asked)
        found = _configured(compose(what, overrides, dialect, unknown_keys), asked, console)
    else:
        _check_played(what, dialect, asked, of_files=asked.data is not None if own is None else own)
        _check_limits(overrides, asked)
        found = _played(what, overrides, asked, console)
    if as_json:
        print(json.dumps(found.as_json(), indent=1, ensure_ascii=False))
    else:
        console.print(_table(found))
        print(f"results: {found.directory / 'results.json'}")
    _say_failures(found)
    return _status(found)


def _own_questions(what: str | None) -> bool | None:
    """Whether a run's directory, or a checkpoint's in it, comes with a configuration that names files of questions; or
    a world, which is False. null where it names neither: then the command has to."""
    from quintet.pipelines.evaluate import config_beside

    config = None if what is None else config_beside(Path(what).expanduser())
    if config is None:
        return None
    tree = read_file(config, {})
    stage = tree.get("sft")
    if stage is not None and not stage.get("then_reinforce") and stage.get("games") is None:
        return None  # what it imitated are conversations
    return bool((tree.get("world") or {}).get("name") == "prompts")


def _check_configured(what: str | None, asked: Asked) -> None:
    """
    Raises:
        ConfigError: it is a model, or options that only a model named here takes.
    """
    hint = "quintet eval MODEL --data FILE, or --world frozenlake"
    if what is not None and Path(what).is_dir():
        raise ConfigError(f"{what} is a directory: what is that model to be asked?", key="eval", value=what, hint=hint)
    for option in asked.said("samples", "temperature", "max_tokens", "limit", "games"):
        told = f"{option} is for a model that is named here; what a configuration evaluates, its own keys say"
        raise ConfigError(told, key=option, hint=hint)


def _configured(composed: Composed, asked: Asked, console: Console) -> Evaluation:
    """An endpoint's answers where one is named; else stored ones where the configuration names some, or those of its
    model where it only validates."""
    config = composed.experiment
    if asked.endpoint is not None:
        return _by_endpoint(composed, asked, console)
    if config.evaluation is None and config.validation.only:
        return _validated(composed, asked, console)
    return _stored(_with_options(composed, asked), console)


def _validated(composed: Composed, asked: Asked, console: Console) -> Evaluation:
    """The configuration's model on its held-out questions or world, drawn as `validation.sampling` says."""
    from quintet.pipelines.evaluate import evaluate_model, model_of
    from quintet.policies.reward_model import import_libraries

    _quiet()
    config, sources = composed.experiment, dict(composed.provenance)
    import_libraries(config.external_libs, "external_libs")
    path = model_of(config)
    if config.policy.path is None or path != Path(config.policy.path):
        sources |= {"policy.path": "checkpoint", "policy.preset": "checkpoint"}
    # a checkpoint's model has its adapters in it
    lora = config.policy.lora if config.policy.path is not None and path == Path(config.policy.path) else None
    policy = config.policy.model_copy(update={"path": str(path), "preset": None, "lora": lora})
    own = replace(composed, experiment=config.model_copy(update={"policy": policy}), provenance=sources)
    measured = _measured(config.validation.sampling.samples, asked)
    return evaluate_model(_with_options(own, asked), measured, console)


def _by_endpoint(composed: Composed, asked: Asked, console: Console) -> Evaluation:
    """An endpoint on the configuration's held-out questions or world."""
    from quintet.pipelines.evaluate import evaluate_model
    from quintet.policies.reward_model import import_libraries

    _quiet()
    import_libraries(composed.experiment.external_libs, "external_libs")
    measured = _measured(composed.experiment.validation.sampling.samples, asked)
    return evaluate_model(_unlimited(_with_options(composed, asked)), measured, console, asked.settings())


def _unlimited(composed: Composed) -> Composed:
    """Without the limit on a prompt's tokens: the endpoint's own holds."""
    from quintet.rollout.endpoint import UNLIMITED

    config, limit = composed.experiment, composed.experiment.rollout.max_prompt_tokens
    source = composed.provenance.get(LIMIT, "default")
    if source not in ("default", COMMAND_LINE):
        print(f"warning: {LIMIT} = {limit} ({source}) isn't held: an endpoint shows no tokens", file=sys.stderr)
    rollout = config.rollout.model_copy(update={"max_prompt_tokens": UNLIMITED})
    sources = {**composed.provenance, LIMIT: "--endpoint"}
    return replace(composed, experiment=config.model_copy(update={"rollout": rollout}), provenance=sources)


def _check_limits(overrides: Sequence[str], asked: Asked) -> None:
    """
    Raises:
        ConfigError: an endpoint is to hold a limit that counts its tokens.
    """
    for word in overrides:
        if asked.endpoint is not None and word.partition("=")[0].lstrip("+") == LIMIT:
            told = f"{word}: an endpoint shows no tokens that could be counted"
            raise ConfigError(told, key=LIMIT, value=word, hint=f"leave {LIMIT} out: its own limit holds")


def _measured(samples: int, asked: Asked) -> Measured:
    """Of so many answers to each question: powers of two, and all of them."""
    from quintet.pipelines.evaluate import Measured

    ks = (*(k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < samples), samples)
    return Measured(ks, confidence=asked.confidence)


def _with_options(composed: Composed, asked: Asked) -> Composed:
    """What the options say, laid over; stored answers without a name of their own take that of their file."""
    config, sources = composed.experiment, dict(composed.provenance)
    changes: dict[str, Any] = {}
    if asked.name is not None or asked.endpoint_model is not None:
        name = _checked_name(asked.name) if asked.name is not None else _name(str(asked.endpoint_model))
        changes["name"], sources["name"] = name, COMMAND_LINE
    elif config.evaluation is not None and sources.get("name", "default") == "default":
        changes["name"] = _name(Path(config.evaluation.path).stem)
        sources["name"] = sources.get("evaluation.path", "default")
    if any(asked.said("output_dir")):
        changes["output_dir"], sources["output_dir"] = asked.output_dir, COMMAND_LINE
    if any(asked.said("confidence")) and config.evaluation is not None:
        changes["evaluation"] = config.evaluation.model_copy(update={"confidence": asked.confidence})
        sources["evaluation.confidence"] = COMMAND_LINE
    return replace(composed, experiment=config.model_copy(update=changes), provenance=sources)


def _stored(composed: Composed, console: Console) -> Evaluation:
    from quintet.pipelines.evaluate import evaluate_stored
    from quintet.policies.reward_model import import_libraries

    _quiet()
    import_libraries(composed.experiment.external_libs, "external_libs")
    return evaluate_stored(composed, console)


def _checked_name(name: str) -> str:
    """
    Raises:
        ConfigError: no directory should be called so.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"--name {name}: a run's name", key="--name", value=name, hint="letters, digits, . _ and -")
    return name


def _name(of: str) -> str:
    """A run's name for what is evaluated."""
    return f"eval-{re.sub(r'[^A-Za-z0-9._-]', '-', of)}"


def _check_played(what: str | None, dialect: str | None, asked: Asked, *, of_files: bool) -> None:
    """`of_files` has questions answered, rather than a world played.

    Raises:
        ConfigError: no model, or options that contradict each other.
    """
    if what is None and asked.endpoint is None:
        raise ConfigError("which model?", key="eval", hint="quintet eval MODEL --data FILE, or --world frozenlake")
    if asked.data is not None and asked.world is not None:
        raise ConfigError("--data and --world: which of them?", key="--data", hint="leave one out")
    if dialect not in (None, NATIVE):
        raise ConfigError(f"a model is asked under native keys, not those of {dialect}", key="--dialect")
    for option in asked.said("games") if of_files else asked.said("limit"):
        other = "--limit" if of_files else "--games"
        raise ConfigError(f"{option} says nothing here", key=option, hint=f"{other} does")
    if asked.samples > 1 and asked.temperature == 0:
        raise ConfigError(
            f"{asked.samples} greedy answers to a question are all the same",
            key="--temperature",
            value=0.0,
            hint="give --temperature 1, or --samples 1",
        )


def _played(what: str | None, overrides: list[str], asked: Asked, console: Console) -> Evaluation:
    from quintet.pipelines.evaluate import evaluate_model, find_model
    from quintet.policies.reward_model import import_libraries

    if asked.endpoint is not None and what is None:
        words = [*_words("", None, asked), *_options(overrides, asked)]
        return _by_endpoint(compose(None, words, NATIVE, "refuse"), asked, console)
    _quiet()
    found = find_model(str(what))
    if asked.endpoint is not None and found.config is None:
        told = f"{what} and --endpoint: which of them answers?"
        raise ConfigError(told, key="--endpoint", value=what, hint="leave one out, or name a run whose settings count")
    words = [*_words(str(what), found, asked), *_options(overrides, asked)]
    composed = compose(None if found.config is None else str(found.config), words, NATIVE, "refuse")
    if asked.endpoint is not None:
        return _by_endpoint(composed, asked, console)
    import_libraries(composed.experiment.external_libs, "external_libs")
    return evaluate_model(composed, _measured(composed.experiment.validation.sampling.samples, asked), console)


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def _words(what: str, found: Found | None, asked: Asked) -> Iterator[str]:
    """The configuration of that model answering, over its run's own, or over the defaults where it comes alone; null
    where an endpoint answers."""
    temperature = asked.temperature if asked.temperature is not None else float(asked.samples > 1)
    settings: dict[str, Any] = {
        "name": asked.name or _name(Path(what).resolve().name),
        "output_dir": asked.output_dir,
        "resume": "never",
        "warm_start": None,
        "sft": None,
        "evaluation": None,
        **ALONE,
        "validation.sampling.samples": asked.samples,
        "validation.sampling.do_sample": temperature > 0,
        "validation.sampling.temperature": temperature,
    }
    settings |= {"policy.preset": None, "policy.path": asked.endpoint if found is None else str(found.policy)}
    if found is not None and found.config is None:
        settings |= {"rollout.engine_options.memory_share": MEMORY_SHARE}
    config = None if found is None else found.config
    if asked.data is not None:
        settings |= _questions(asked, config)
    else:
        settings |= _games(asked) if asked.world is not None else _fewer(asked)
    if asked.max_tokens is not None:
        settings["rollout.max_response_tokens"] = asked.max_tokens
    yield from (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items())


def _questions(asked: Asked, config: Path | None) -> dict[str, Any]:
    """Columns are those of the run's own questions; conversations that it imitated have others."""
    settings: dict[str, Any] = {
        "worlds": {},
        "world.name": "prompts",
        "data.train_files": [asked.data],
        "data.validation_files": [asked.data],
        "data.weights": [],
        "data.validation_rows": asked.limit,
    }
    if config is None or read_file(config, {}).get("sft") is not None:
        settings |= {"rollout.max_response_tokens": ANSWER_TOKENS, "rollout.max_prompt_tokens": PROMPT_TOKENS}
        settings |= {f"data.{key}": DataConfig.model_fields[key].default for key in COLUMNS}
    return settings


def _fewer(asked: Asked) -> dict[str, Any]:
    """What the run's own configuration names, and how much of it."""
    wanted = {"limit": ("data.validation_rows", asked.limit), "games": ("validation.games", asked.games)}
    return dict(wanted[option.removeprefix("--")] for option in asked.said(*wanted))


def _games(asked: Asked) -> dict[str, Any]:
    return {"worlds": {}, "world.name": asked.world, "data": None, "reward": None, "validation.games": asked.games}


def _options(overrides: Sequence[str], asked: Asked) -> Iterator[str]:
    """`size=6` is `world.size=6` where the world has such an option."""
    options = _world_options(asked.world) if asked.world is not None else set()
    yield from (f"world.{word}" if word.partition("=")[0] in options else word for word in overrides)


def _world_options(world: str) -> set[str]:
    from quintet.envs import catalogue  # noqa: F401 - registers the worlds
    from quintet.envs.world import WORLDS

    return set(getattr(WORLDS.get(world).config, "model_fields", ()))


def _table(found: Evaluation) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{found.answers} answers")
    for column in ("", "", "mean", f"{found.measured.confidence:.0%} interval", "prompts"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, source in found.sources.items():
        for place, (label, one) in enumerate(_rows(source)):
            # a file's own words are no markup
            shown = Text(name if place == 0 else "")
            table.add_row(shown, label, f"{one.mean:.4g}", _interval(one), str(one.prompts))
        table.add_section()
    return table


def _rows(source: Estimates) -> Iterator[tuple[str, Estimate]]:
    yield "score", source.score
    if source.accuracy is not None:
        yield "acc", source.accuracy
    yield from ((f"pass@{k}", one) for k, one in source.passed.items())
    # a vote of one is no vote
    yield from ((f"maj@{k}", one) for k, one in source.majority.items() if k > 1)


def _interval(one: Estimate) -> str:
    return "–" if one.low is None else f"{one.low:.4g} … {one.high:.4g}"


def _say_failures(found: Evaluation) -> None:
    for name, kinds in found.failures.items():
        told = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
        if told:
            print(f"{name}: answers that couldn't be judged and count as wrong: {told}", file=sys.stderr)


def _status(found: Evaluation) -> int:
    """An evaluation of which most failed has said little about the answers."""
    return int(found.failed * 2 > found.answers)
