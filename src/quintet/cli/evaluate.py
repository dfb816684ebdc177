"""`quintet eval`: score stored answers, or the answers of a model or an endpoint."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.cli.choices import user_file_problems
from quintet.cli.config_source import NATIVE
from quintet.cli.configuration import TRAINING_CODE, as_overrides, generation_settings, load_config, load_run_config
from quintet.cli.messages import warn
from quintet.cli.model_downloads import downloaded_model, with_downloaded_models
from quintet.cli.options import EvalOptions
from quintet.cli.transformers_setup import silence_transformers
from quintet.config.composed import ComposedConfig
from quintet.config.native.data import DataConfig
from quintet.config.problems import raise_problems
from quintet.config.yaml_reader import COMMAND_LINE, read_file
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from quintet.pipelines.evaluation_results import Evaluation, Statistics
    from quintet.pipelines.model_lookup import StoredModel
    from quintet.rollout.engines.openai_endpoint import EndpointSettings

ANSWER_TOKENS, PROMPT_TOKENS = 512, 8192
"""Defaults for a model without the configuration of a run."""
CONVERSATION_KEYS = ("prompt_key", "messages_key", "response_key", "truth_key", "source_key")
"""Keys of the `data` section that describe SFT conversations and do not apply to prompts."""
ENDPOINT_OPTIONS = ("endpoint_model", "endpoint_key", "endpoint_concurrent", "endpoint_retries", "endpoint_timeout")
"""Options that are valid only with `--endpoint`."""
PROMPT_LIMIT_KEY = "rollout.max_prompt_tokens"


def run(
    target: str | None,
    overrides: list[str],
    dialect: str | None,
    unknown_keys: str,
    options: EvalOptions,
    *,
    as_json: bool = False,
) -> int:
    """Evaluate, print the results and return the exit status: 1 if most answers could not be scored.

    Raises:
        ConfigError: An option or the configuration is invalid.
        MachineError: A model or a file cannot be read or written.
    """
    silence_transformers()
    from rich.console import Console

    # with --json, stdout holds nothing but JSON
    console = Console(stderr=as_json)
    _endpoint_settings(options)
    has_data_files = _has_data_files(target) if options.data is None and options.env is None else None
    if options.data is None and options.env is None and has_data_files is None:
        _check_config_options(target, options)
        _check_limits(overrides, options)
        evaluation = _evaluate_config(load_config(target, overrides, dialect, unknown_keys), options, console)
    else:
        _check_model_options(
            target, dialect, options, from_files=options.data is not None if has_data_files is None else has_data_files
        )
        _check_limits(overrides, options)
        evaluation = _evaluate_model(target, overrides, options, console)
    if as_json:
        print(json.dumps(evaluation.as_json(), indent=1, ensure_ascii=False))
    else:
        from quintet.cli.evaluation_table import evaluation_table

        console.print(evaluation_table(evaluation))
        print(f"results: {evaluation.directory / 'results.json'}")
    _print_failures(evaluation)
    return int(evaluation.failed * 2 > evaluation.answers)


def _endpoint_settings(options: EvalOptions) -> EndpointSettings | None:
    """Return the settings of the endpoint, None without `--endpoint`.

    Raises:
        ConfigError: The model name is missing, or endpoint options are given without an endpoint.
    """
    if options.endpoint is None:
        for option in options.explicit(*ENDPOINT_OPTIONS):
            raise ConfigError(f"{option} is only valid with --endpoint", key=option, hint="add --endpoint http://…/v1")
        return None
    if options.endpoint_model is None:
        raise ConfigError("--endpoint requires a model name", key="--endpoint-model", hint="add --endpoint-model NAME")
    from quintet.rollout.engines.openai_endpoint import EndpointSettings

    settings = EndpointSettings(
        options.endpoint,
        options.endpoint_model,
        options.endpoint_key,
        options.endpoint_concurrent,
        options.endpoint_retries,
        options.endpoint_timeout,
    )
    settings.check()
    return settings


def _has_data_files(target: str | None) -> bool | None:
    """Return whether the configuration of a run directory or checkpoint names data files (True) or an environment
    (False); None if it names neither."""
    from quintet.pipelines.model_lookup import find_run_config

    config = None if target is None else find_run_config(Path(target).expanduser())
    if config is None:
        return None
    tree = read_file(config, {})
    sft = tree.get("sft")
    if sft is not None and not sft.get("then_reinforce") and sft.get("episodes") is None:
        return None  # its data files are SFT conversations
    return bool((tree.get("env") or {}).get("name") == "prompts")


def _check_config_options(target: str | None, options: EvalOptions) -> None:
    """
    Raises:
        ConfigError: `target` is a model, or options are given that are only valid with a model.
    """
    hint = "quintet eval MODEL --data FILE, or --env frozenlake"
    if target is not None and Path(target).is_dir():
        message = f"{target} is a model directory, but neither --data nor --env is given"
        raise ConfigError(message, key="eval", value=target, hint=hint)
    for option in options.explicit("samples", "temperature", "max_tokens", "limit", "episodes"):
        message = f"{option} is only valid with a model; a configuration sets it by its keys"
        raise ConfigError(message, key=option, hint=hint)


def _evaluate_config(composed: ComposedConfig, options: EvalOptions, console: Console) -> Evaluation:
    """Evaluate the endpoint, the model (with `validation.only`) or the stored answers of a configuration."""
    config = composed.experiment
    raise_problems(user_file_problems(composed))
    if options.endpoint is not None:
        return _evaluate_endpoint(composed, options, console)
    if config.evaluation is None and config.validation.only:
        return _evaluate_config_model(composed, options, console)
    from quintet.pipelines.evaluate import evaluate_stored

    return evaluate_stored(_with_options(composed, options), console)


def _evaluate_config_model(composed: ComposedConfig, options: EvalOptions, console: Console) -> Evaluation:
    """Evaluate the configuration's model on its held-out prompts or environment with `validation.sampling`."""
    from quintet.pipelines.evaluate import evaluate_model
    from quintet.pipelines.model_lookup import with_configured_model

    with_model = with_configured_model(with_downloaded_models(composed), warn)
    return evaluate_model(_with_options(with_model, options), _statistics(composed, options), console)


def _evaluate_endpoint(composed: ComposedConfig, options: EvalOptions, console: Console) -> Evaluation:
    """Evaluate an endpoint on the configuration's held-out prompts or environment."""
    from quintet.pipelines.evaluate import evaluate_model

    limitless, measured = _without_prompt_limit(_with_options(composed, options)), _statistics(composed, options)
    return evaluate_model(limitless, measured, console, _endpoint_settings(options))


def _without_prompt_limit(composed: ComposedConfig) -> ComposedConfig:
    """Remove the limit on prompt tokens: an endpoint enforces its own."""
    from quintet.rollout.engines.openai_endpoint import UNLIMITED

    config, limit = composed.experiment, composed.experiment.rollout.max_prompt_tokens
    source = composed.provenance.get(PROMPT_LIMIT_KEY, "default")
    if source not in ("default", COMMAND_LINE):
        warn(f"{PROMPT_LIMIT_KEY} = {limit} ({source}) is ignored: an endpoint does not report tokens")
    rollout = config.rollout.model_copy(update={"max_prompt_tokens": UNLIMITED})
    sources = {**composed.provenance, PROMPT_LIMIT_KEY: "--endpoint"}
    return replace(composed, experiment=config.model_copy(update={"rollout": rollout}), provenance=sources)


def _check_limits(overrides: Sequence[str], options: EvalOptions) -> None:
    """
    Raises:
        ConfigError: A token limit is set for an endpoint.
    """
    for override in overrides:
        if options.endpoint is not None and override.partition("=")[0].lstrip("+") == PROMPT_LIMIT_KEY:
            message = f"{override}: prompt tokens of an endpoint cannot be counted"
            hint = f"remove {PROMPT_LIMIT_KEY}; the endpoint enforces its own limit"
            raise ConfigError(message, key=PROMPT_LIMIT_KEY, value=override, hint=hint)


def _statistics(composed: ComposedConfig, options: EvalOptions) -> Statistics:
    """Return which pass@k to compute: powers of two below the number of samples, and that number."""
    from quintet.pipelines.evaluation_results import Statistics

    samples = composed.experiment.validation.sampling.samples
    ks = (*(k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < samples), samples)
    return Statistics(ks, confidence=options.confidence)


def _with_options(composed: ComposedConfig, options: EvalOptions) -> ComposedConfig:
    """Apply the command-line options; stored answers without a configured name are named after their file."""
    config, sources = composed.experiment, dict(composed.provenance)
    changes: dict[str, Any] = {}
    if options.name is not None or options.endpoint_model is not None:
        name = _valid_name(options.name) if options.name is not None else _name(str(options.endpoint_model), options)
        changes["name"], sources["name"] = name, COMMAND_LINE
    elif config.evaluation is not None and sources.get("name", "default") == "default":
        changes["name"] = _name(Path(config.evaluation.path).stem, options)
        sources["name"] = sources.get("evaluation.path", "default")
    if any(options.explicit("output_dir")):
        changes["output_dir"], sources["output_dir"] = options.output_dir, COMMAND_LINE
    if any(options.explicit("confidence")) and config.evaluation is not None:
        changes["evaluation"] = config.evaluation.model_copy(update={"confidence": options.confidence})
        sources["evaluation.confidence"] = COMMAND_LINE
    return replace(composed, experiment=config.model_copy(update=changes), provenance=sources)


def _valid_name(name: str) -> str:
    """
    Raises:
        ConfigError: `name` is not a valid run name.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(
            f"--name {name}: invalid run name", key="--name", value=name, hint="valid: letters, digits, . _ and -"
        )
    return name


def _name(target: str, options: EvalOptions) -> str:
    """Return the run name for an evaluation of `target` on what the options name."""
    source = options.env or (options.data and Path(options.data).stem)
    name = f"{target}-{source}" if source else target
    return f"eval-{re.sub(r'[^A-Za-z0-9._-]', '-', name)}"


def _check_model_options(target: str | None, dialect: str | None, options: EvalOptions, *, from_files: bool) -> None:
    """Check the options of an evaluation on data files (`from_files`) or in an environment.

    Raises:
        ConfigError: The model is missing, or options contradict each other.
    """
    if target is None and options.endpoint is None:
        raise ConfigError(
            "the model is missing", key="eval", hint="quintet eval MODEL --data FILE, or --env frozenlake"
        )
    if options.data is not None and options.env is not None:
        raise ConfigError("--data and --env are mutually exclusive", key="--data", hint="remove one of them")
    if dialect not in (None, NATIVE):
        raise ConfigError(
            f"--dialect {dialect}: a model is evaluated with native keys", key="--dialect", hint="remove --dialect"
        )
    for option in options.explicit("episodes") if from_files else options.explicit("limit"):
        other = "--limit" if from_files else "--episodes"
        raise ConfigError(f"{option} has no effect here", key=option, hint=f"use {other}")
    if options.samples > 1 and options.temperature == 0:
        raise ConfigError(
            f"{options.samples} greedy responses to a prompt are identical",
            key="--temperature",
            value=0.0,
            hint="set --temperature 1 or --samples 1",
        )


def _evaluate_model(target: str | None, overrides: list[str], options: EvalOptions, console: Console) -> Evaluation:
    from quintet.pipelines.evaluate import evaluate_model
    from quintet.pipelines.model_lookup import find_model

    if options.endpoint is not None and target is None:
        arguments = [*_model_overrides("", None, options), *_env_overrides(overrides, options)]
        return _evaluate_endpoint(load_config(None, arguments, NATIVE, "refuse", of_run=True), options, console)
    source = find_model(downloaded_model(str(target)), warn)
    if options.endpoint is not None and source.config is None:
        message = f"{target} and --endpoint are mutually exclusive"
        raise ConfigError(
            message, key="--endpoint", value=target, hint="remove one of them, or name a run for its settings"
        )
    arguments = [*_model_overrides(str(target), source, options), *_env_overrides(overrides, options)]
    composed = load_run_config(source.config, arguments, unused=TRAINING_CODE)
    raise_problems(user_file_problems(composed))
    if options.endpoint is not None:
        return _evaluate_endpoint(composed, options, console)
    return evaluate_model(composed, _statistics(composed, options), console)


def _model_overrides(target: str, source: StoredModel | None, options: EvalOptions) -> Iterator[str]:
    """Yield the overrides that turn the configuration of the model's run, or the defaults, into an evaluation.

    `source` is None for an endpoint."""
    temperature = options.temperature if options.temperature is not None else float(options.samples > 1)
    config = None if source is None else source.config
    settings: dict[str, Any] = {
        "name": options.name or _name(Path(os.path.abspath(target)).name, options),
        "output_dir": options.output_dir,
        **generation_settings(
            str(options.endpoint if source is None else source.policy), has_run=source is None or config is not None
        ),
        "validation.sampling.samples": options.samples,
        "validation.sampling.do_sample": temperature > 0,
        "validation.sampling.temperature": temperature,
    }
    if options.data is not None:
        settings |= data_settings(options.data, config, options.limit)
    else:
        settings |= _env_settings(options) if options.env is not None else _size_settings(options)
    if options.max_tokens is not None:
        settings["rollout.max_response_tokens"] = options.max_tokens
    yield from as_overrides(settings)


def data_settings(data: str, config: Path | None, limit: int | None = None) -> dict[str, Any]:
    """Return the settings for a data file; the run's column names apply unless they describe SFT conversations."""
    settings: dict[str, Any] = {
        "envs": {},
        "env.name": "prompts",
        "data.train_files": [data],
        "data.validation_files": [data],
        "data.weights": [],
        "data.validation_rows": limit,
    }
    if config is None or read_file(config, {}).get("sft") is not None:
        settings |= {"rollout.max_response_tokens": ANSWER_TOKENS, "rollout.max_prompt_tokens": PROMPT_TOKENS}
        settings |= {f"data.{key}": DataConfig.model_fields[key].default for key in CONVERSATION_KEYS}
    return settings


def _size_settings(options: EvalOptions) -> dict[str, Any]:
    """Return the settings that limit the run's own prompts or episodes."""
    settings = {"limit": ("data.validation_rows", options.limit), "episodes": ("validation.episodes", options.episodes)}
    return dict(settings[option.removeprefix("--")] for option in options.explicit(*settings))


def _env_settings(options: EvalOptions) -> dict[str, Any]:
    return {"envs": {}, "env.name": options.env, "data": None, "reward": None, "validation.episodes": options.episodes}


def _env_overrides(overrides: Sequence[str], options: EvalOptions) -> Iterator[str]:
    """Expand `size=6` to `env.size=6` if the environment has this option."""
    env_options = _env_options(options.env) if options.env is not None else set()
    for override in overrides:
        yield f"env.{override}" if override.partition("=")[0] in env_options else override


def _env_options(env: str) -> set[str]:
    from quintet.config.native.envs import ENVS

    return set(getattr(ENVS.get(env).config, "model_fields", ()))


def _print_failures(evaluation: Evaluation) -> None:
    for name, kinds in evaluation.failures.items():
        counts = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
        if counts:
            print(f"{name}: answers that could not be scored and count as wrong: {counts}", file=sys.stderr)
    if any(evaluation.failures.values()):
        print(f"  the field `failure` in {evaluation.directory / 'answers.jsonl'} has the messages", file=sys.stderr)
