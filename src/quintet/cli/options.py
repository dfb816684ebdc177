"""Options that commands share, and groups of options that a command takes as one dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from quintet.cli.completion import complete_config, complete_key
from quintet.cli.example_files import with_installed_examples
from quintet.cli.messages import warn
from quintet.errors import ConfigError

Config = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help="YAML file, run script or file of key=value lines (default: built-in configuration).",
        autocompletion=complete_config,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Configuration overrides.", autocompletion=complete_key),
]
DialectName = Annotated[
    str | None,
    typer.Option(
        "--dialect", help="Source framework of CONFIG: native, ragen, verl, vagen, rlinf or roll (default: detected)."
    ),
]
Release = Annotated[
    str | None,
    typer.Option(
        "--release",
        metavar="RELEASE",
        help="Release of the source framework whose defaults apply, such as 0.4 (default: recognised by the keys).",
    ),
]
UnknownKeys = Annotated[
    str,
    typer.Option(
        help="Unknown keys of another framework's configuration: `refuse`, `warn` and ignore them, or `ignore-fork`,"
        " which is --ignore-fork-keys."
    ),
]
IgnoreForkKeys = Annotated[
    bool, typer.Option("--ignore-fork-keys", help="Leave out keys of a fork that cannot decide what is trained.")
]

RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Start one process per device through Ray: local, auto or HOST:PORT; http://HOST:8265 submits a job.",
    ),
]
MaxRestarts = Annotated[
    int, typer.Option(help="With --ray: how often to continue from the last checkpoint after a failure.", min=0)
]


def split(config: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """Split the arguments: the first one is a file unless it is a `key=value` override."""
    remaining = list(overrides or [])
    path, given = (None, [config, *remaining]) if config is not None and "=" in config else (config, remaining)
    for key, values in _repeated(given).items():
        warn(f"{key} is given {len(values)} times: {key}={values[-1]} counts, not {', '.join(values[:-1])}")
    return None if path is None else with_installed_examples(path), [*map(with_installed_examples, given)]


def _repeated(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return the keys with several different values, in their order."""
    values: dict[str, list[str]] = {}
    for key, _, value in (override.partition("=") for override in overrides):
        values.setdefault(key, []).append(value)
    return {key: listed for key, listed in values.items() if len({*listed}) > 1}


def with_release(dialect: str | None, release: str | None) -> str | None:
    """Return the values of `--dialect` and `--release` as one text: `verl@0.4`."""
    return dialect if release is None else f"{dialect or ''}@{release}"


def unknown_key_policy(unknown_keys: str, ignore_fork_keys: bool) -> str:
    """Return what is done with unknown keys: `--unknown-keys warn` leaves out those of forks, too."""
    return "ignore-fork" if ignore_fork_keys and unknown_keys == "refuse" else unknown_keys


def key_value_pairs(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` arguments; values are YAML.

    Raises:
        ConfigError: an argument has no key, or a value that is not YAML.
    """
    import yaml

    pairs: dict[str, Any] = {}
    for argument in arguments:
        name, sign, value = argument.partition("=")
        if not sign or not name:
            raise ConfigError(f"{argument!r} is not KEY=VALUE", value=argument, hint="for example digits=3")
        try:
            pairs[name] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{argument}: the value is not valid YAML", key=name, value=value, hint="quote the value"
            ) from error
    return pairs


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command to which typer gives one option per field of its parameter `options`, a dataclass."""
    signature = inspect.signature(command, eval_str=True)
    parameters = dict(signature.parameters)
    group: Any = parameters["options"].annotation
    annotations = get_type_hints(group, include_extras=True)
    names = [field.name for field in fields(group)]

    @wraps(command)
    def run(**arguments: Any) -> None:
        command(options=group(**{name: arguments.pop(name) for name in names}), **arguments)

    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotations[field.name]
        )
        for field in fields(group)
    ]
    flat = [part for name, parameter in parameters.items() for part in (options if name == "options" else [parameter])]
    run.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of commands that start the processes of a run."""

    dialect: DialectName = None
    release: Release = None
    unknown_keys: UnknownKeys = "refuse"
    ignore_fork_keys: IgnoreForkKeys = False
    ray: RayAddress = None
    max_restarts: MaxRestarts = 3

    @property
    def source_format(self) -> str | None:
        """The dialect, with the release if one is named."""
        return with_release(self.dialect, self.release)

    @property
    def unknown_key_policy(self) -> str:
        return unknown_key_policy(self.unknown_keys, self.ignore_fork_keys)


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """Options of `quintet eval`. An option with its default value counts as not given."""

    data: Annotated[str | None, typer.Option(metavar="FILE", help="Data file with prompts for the model.")] = None
    env: Annotated[str | None, typer.Option(help="Environment to evaluate in.")] = None
    samples: Annotated[int, typer.Option(help="Responses per prompt, or episodes per start state.", min=1)] = 1
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy (default: 0 for one sample, 1 for several).", min=0.0)
    ] = None
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per response.", min=1)] = None
    limit: Annotated[int | None, typer.Option(help="Maximum number of prompts.", min=1)] = None
    episodes: Annotated[int, typer.Option(help="Number of start states.", min=1)] = 256
    confidence: Annotated[float, typer.Option(help="Confidence level of the intervals.", min=0.01, max=0.999)] = 0.95
    name: Annotated[str | None, typer.Option(help="Name of the results directory.")] = None
    output_dir: Annotated[str, typer.Option(help="Parent directory of the results.")] = "runs"
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenAI-compatible endpoint to evaluate, http://…/v1.")
    ] = None
    endpoint_model: Annotated[str | None, typer.Option(metavar="NAME", help="Model name at the endpoint.")] = None
    endpoint_key: Annotated[str, typer.Option(metavar="VARIABLE", help="Environment variable with the API key.")] = (
        "OPENAI_API_KEY"
    )
    endpoint_concurrent: Annotated[int, typer.Option(help="Maximum concurrent requests.", min=1)] = 16
    endpoint_retries: Annotated[int, typer.Option(help="Retries of a failed request.", min=0)] = 2
    endpoint_timeout: Annotated[float, typer.Option(help="Timeout of a request in seconds.", min=0.001)] = 300.0

    def explicit(self, *names: str) -> Iterator[str]:
        """Yield the options among `names` that differ from their defaults, as spelled on the command line."""
        defaults = {field.name: field.default for field in fields(self)}
        yield from (f"--{name.replace('_', '-')}" for name in names if getattr(self, name) != defaults[name])


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options of `quintet generate` with a model in place of a configuration."""

    data: Annotated[str | None, typer.Option(metavar="FILE", help="Data file with prompts for the model.")] = None
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Parquet or JSON Lines file to write.")
    ] = None
    samples: Annotated[int | None, typer.Option(help="Responses per prompt (default: 1).", min=1)] = None
    temperature: Annotated[float | None, typer.Option(help="0 is greedy (default: the run's, else 1).", min=0.0)] = None
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum tokens per response (default: the run's, else 512).", min=1)
    ] = None

    def set_options(self) -> Iterator[str]:
        """Yield the options that were given, as spelled on the command line."""
        yield from (f"--{each.name.replace('_', '-')}" for each in fields(self) if getattr(self, each.name) is not None)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `quintet serve`; None takes the value of the run's configuration or the default."""

    engine: Annotated[
        str | None, typer.Option(help="hf, vllm or sglang (default: the engine of the run, else hf).")
    ] = None
    host: Annotated[str, typer.Option(help="Address to bind; other than loopback only with a token.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port; 0 selects a free one.", min=0, max=65535)] = 8000
    token: Annotated[
        str | None,
        typer.Option(help="Bearer token that clients must send; prefer the environment variable QUINTET_TOKEN."),
    ] = None
    name: Annotated[str | None, typer.Option(help="Model name in requests (default: name of the directory).")] = None
    max_concurrent: Annotated[
        int | None, typer.Option(help="Maximum number of concurrently decoded requests.", min=1)
    ] = None
    context: Annotated[
        int | None, typer.Option(help="Maximum context length in tokens, prompt and completion.", min=2)
    ] = None
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow code from the model directory.")
    ] = False


@dataclass(frozen=True, slots=True)
class ServeEnvsOptions:
    """Options of `quintet serve-envs`."""

    host: Annotated[str, typer.Option(help="Address to bind; other than loopback only with a token.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port; 0 selects a free one.", min=0, max=65535)] = 5000
    token_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable with the token that clients must send.")
    ] = "QUINTET_TOKEN"  # noqa: S105 - the name of a variable
    workers: Annotated[
        int | None, typer.Option(help="Number of worker processes (default: number of CPU cores).", min=1)
    ] = None
    max_sessions: Annotated[
        int, typer.Option(help="Maximum number of sessions of a client; all clients have an eighth more.", min=1)
    ] = 256
    max_envs: Annotated[
        int, typer.Option(help="Maximum number of environments of a client; all clients have an eighth more.", min=1)
    ] = 4096
    session_timeout: Annotated[
        float, typer.Option(help="Seconds without a request after which a session is closed.", min=1.0)
    ] = 600.0
    env_timeout: Annotated[
        float,
        typer.Option(help="Seconds for a reset, or for the actions of a step; then the process is killed.", min=0.1),
    ] = 60.0
    worker_memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Address space limit of a worker process (default: none).", min=0.25),
    ] = None
    max_body: Annotated[float, typer.Option(metavar="MIB", help="Maximum size of a request's body.", min=0.001)] = 16.0
    max_response: Annotated[
        float, typer.Option(metavar="MIB", help="Maximum size of the results of a request.", min=0.001)
    ] = 256.0


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of `quintet plan`; None uses the configuration or this machine."""

    prompt: Annotated[
        bool,
        typer.Option("--prompt", help="Show the first prompt as the policy sees it; runs the code of the environment."),
    ] = False

    here: Annotated[
        bool, typer.Option("--here", help="Show all overrides with which the run works on this machine.")
    ] = False
    device_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB", help="Memory per device in GiB; exit with an error if the run does not fit.", min=0.001
        ),
    ] = None
    fit: Annotated[
        bool, typer.Option("--fit", help="Propose parallel sizes, micro-batches and offloads with which the run fits.")
    ] = False
    devices: Annotated[int | None, typer.Option(help="With --fit: number of devices of all nodes.", min=1)] = None
    nodes: Annotated[int | None, typer.Option(help="With --fit: number of nodes (default: 8 devices each).", min=1)] = (
        None
    )
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --fit: such as a100 or h100 (default: this machine's).")
    ] = None
    write: Annotated[
        int | None, typer.Option(metavar="N", help="With --fit: number of the proposal to write (default: 1).", min=1)
    ] = None
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="With --fit: file for the configuration of a proposal."),
    ] = None

    def refuse_without_fit(self) -> None:
        """Check that no option of `--fit` is given without it.

        Raises:
            ConfigError: one is.
        """
        for name in ("devices", "nodes", "device", "write", "output"):
            if getattr(self, name) is not None:
                raise ConfigError(f"--{name} has an effect only with --fit", key=f"--{name}", hint="add --fit")
