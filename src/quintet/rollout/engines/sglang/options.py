"""Arguments of SGLang: engine options under the names of the installed release."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quintet.config.native.rollout import EngineConfig
from quintet.errors import ConfigError, MachineError, did_you_mean
from quintet.package_files import read_yaml

if TYPE_CHECKING:
    from quintet.rollout.engines.engine import EngineSetup

KEY = "rollout.engine_options"
LOCATE_SGLANG = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("sglang")
place = list(spec.submodule_search_locations or [None])[0] if spec else None
print(json.dumps([place, importlib.metadata.version("sglang") if spec else None]))
"""
RESERVED_TOKENS = 8
"""Maximum number of context tokens that SGLang reserves."""


@dataclass(frozen=True, slots=True)
class Option:
    """An engine option's SGLang arguments: the first of `names` that the release has, or with `all` every one."""

    names: tuple[str, ...]
    convert: Callable[[Any], Any] = lambda value: value
    """Value for SGLang; None keeps SGLang's default."""
    all: bool = False


OPTIONS: Mapping[str, Option] = {
    "attention_backend": Option(("attention_backend",)),
    "block_size": Option(("page_size",)),
    "cuda_graph_max_batch": Option(("cuda_graph_max_bs_decode", "cuda_graph_max_bs")),
    "deterministic": Option(("enable_deterministic_inference",)),
    "detokenize": Option(("skip_tokenizer_init",), lambda value: not value),
    "eager": Option(("disable_cuda_graph",)),
    "image_cache": Option(("mm_preprocess_cache_size_mb",), lambda value: None if value else 0),
    "load_format": Option(("load_format",)),
    "log_every_steps": Option(("decode_log_interval",)),
    "log_statistics": Option(("log_level",), lambda value: "info" if value else "warning"),
    "max_batched_tokens": Option(("chunked_prefill_size", "max_prefill_tokens"), all=True),
    # after max_batched_tokens, which alone would turn it on
    "chunked_prefill": Option(("chunked_prefill_size",), lambda value: None if value else -1),
    "memory_share": Option(("mem_fraction_static",)),
    "offload": Option(("enable_memory_saver", "enable_weights_cpu_backup"), all=True),
    "pipeline_parallel": Option(("pp_size",)),
    "sleep_between_steps": Option(("enable_memory_saver",)),
    "tensor_parallel": Option(("tp_size",)),
    "torch_compile": Option(("enable_torch_compile",)),
    "torch_compile_max_batch": Option(("torch_compile_max_bs",)),
}
"""SGLang arguments by engine option."""
TABLES: Final = read_yaml(__file__)
ALWAYS_PASSED, NOT_PASSED = TABLES["always_passed"], frozenset(TABLES["not_passed"])
RESERVED: Mapping[str, str] = TABLES["reserved"]


@dataclass(frozen=True, slots=True)
class Release:
    """An SGLang release."""

    name: str
    """`SGLang 0.5.23`."""
    arguments: frozenset[str]
    """Names of the fields of its `ServerArgs`."""


def installed_release(python: str | None = None) -> Release:
    """Find the SGLang release of this Python environment, or of the environment of the interpreter `python`, without a
    slow import that would look for a device.

    Raises:
        ConfigError: `python` does not run.
        MachineError: SGLang is not installed, or its source layout is unknown.
    """
    directory, version = _locate() if python is None else _locate_in(python)
    if directory is None:
        raise MachineError(
            f"SGLang is not installed {'in this environment' if python is None else f'for {python}'}",
            hint=f"install it in a separate environment (docs/sglang.md) and set {KEY}.server_python; or set "
            f"{KEY}.server_url to a running server with rollout.engine=sglang-server",
        )
    arguments = frozenset(_server_args_fields(Path(directory, "srt")))
    if "model_path" not in arguments:
        raise MachineError(
            f"SGLang {version} in {directory} has no known ServerArgs",
            hint="install a supported release: pip install sglang",
        )
    return Release(f"SGLang {version}", arguments)


def _locate() -> tuple[str | None, str]:
    """Directory of the package, and its version."""
    spec = importlib.util.find_spec("sglang")
    directories = list(spec.submodule_search_locations or ()) if spec is not None else []
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return (directories[0] if directories else None), version


def _locate_in(python: str) -> tuple[str | None, str]:
    """The same in another environment."""
    try:
        done = subprocess.run([python, "-c", LOCATE_SGLANG], capture_output=True, text=True, check=True, timeout=60)  # noqa: S603
        directory, version = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        message = getattr(error, "stderr", None) or str(error)
        raise ConfigError(
            f"{KEY}.server_python = {python!r} does not run: {message.splitlines()[-1]}",
            key=f"{KEY}.server_python",
            value=python,
            hint="set it to bin/python of an environment with SGLang",
        ) from error
    return directory, str(version)


def _server_args_fields(package: Path) -> Iterator[str]:
    """Fields of `ServerArgs`, which newer releases compose of several classes."""
    for path in (package / "server_args.py", *sorted((package / "arg_groups" / "fields").glob("*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and (path.parent != package or node.name == "ServerArgs"):
                targets = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def server_arguments(setup: EngineSetup, release: Release) -> dict[str, Any]:
    """Build the fields of `ServerArgs` for an engine setup.

    Raises:
        ConfigError: SGLang, or this release, does not have an option.
        MachineError: the release lacks a required argument.
    """
    required = {
        "model_path": str(setup.directory),
        "trust_remote_code": setup.trust_remote_code,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "context_length": _context_length(setup),
        "max_running_requests": setup.max_num_seqs,
        "random_seed": setup.seed,
        "weight_version": "0",
    }
    if missing := sorted(required.keys() - release.arguments):
        raise MachineError(
            f"{release.name} has no argument {missing[0]!r}",
            hint="install a supported release: pip install sglang==0.5.23",
        )
    return required | option_arguments(setup.options, release)


def _context_length(setup: EngineSetup) -> int:
    """The context plus the tokens that SGLang reserves, within the model's maximum."""
    limit = getattr(setup.model.config, "max_position_embeddings", None)
    length = setup.max_model_len + RESERVED_TOKENS
    return length if limit is None else max(setup.max_model_len, min(length, int(limit)))


def option_arguments(options: EngineConfig, release: Release) -> dict[str, Any]:
    """Convert engine options to SGLang arguments.

    Raises:
        ConfigError: the release does not have an option.
    """
    changed = _changed_options(options)
    for name in sorted(changed - OPTIONS.keys()):
        raise _unknown_option(name, getattr(options, name), release)
    arguments: dict[str, Any] = {}
    for name in (name for name in OPTIONS if name in changed or name in ALWAYS_PASSED):
        arguments |= _arguments(name, getattr(options, name), release)
    return arguments | _extra_arguments(options, release)


def _changed_options(options: EngineConfig) -> set[str]:
    """Names of options that differ from their defaults."""
    fields = type(options).model_fields
    default = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    return {name for name in fields.keys() - NOT_PASSED if getattr(options, name) != default[name]}


def _arguments(name: str, value: Any, release: Release) -> dict[str, Any]:
    option = OPTIONS[name]
    names = [alias for alias in option.names if alias in release.arguments]
    if not names or (option.all and len(names) < len(option.names)):
        raise _unknown_option(name, value, release)
    converted = option.convert(value)
    return {} if converted is None else dict.fromkeys(names if option.all else names[:1], converted)


def _unknown_option(name: str, value: Any, release: Release) -> ConfigError:
    names = OPTIONS[name].names if name in OPTIONS else ()
    other_names = f" (other releases: {' or '.join(names)})" if names else ""
    return ConfigError(
        f"{KEY}.{name} = {value!r}: {release.name} has no such option{other_names}",
        key=f"{KEY}.{name}",
        value=value,
        hint=f"remove {KEY}.{name}, or use another engine",
    )


def _extra_arguments(options: EngineConfig, release: Release) -> dict[str, Any]:
    """Arguments under SGLang's names, from `engine_options.arguments`."""
    for name, value in options.arguments.items():
        key = f"{KEY}.arguments.{name}"
        if name in RESERVED:
            instead = f"set {RESERVED[name]} instead" if RESERVED[name] else f"remove {key}"
            raise ConfigError(f"{key}: {name} is set by Quintet", key=key, value=value, hint=instead)
        if name not in release.arguments:
            hint = did_you_mean(name, release.arguments) or f"remove {key}"
            raise ConfigError(f"{key}: {release.name} has no argument {name!r}", key=key, value=value, hint=hint)
    return dict(options.arguments)


def find_mismatch(options: EngineConfig, running: Mapping[str, Any], release: Release) -> ConfigError | None:
    """Return an error if a running server has other values than the options, else None.

    Raises:
        ConfigError: the server does not have an option.
    """
    expected: dict[str, tuple[str, Any]] = {}
    for name in _changed_options(options) & OPTIONS.keys():
        arguments = _arguments(name, getattr(options, name), release)
        expected |= {argument: (name, value) for argument, value in arguments.items()}
    extra = _extra_arguments(options, release)
    expected |= {name: (f"arguments.{name}", value) for name, value in extra.items()}
    for argument, (name, value) in sorted(expected.items()):
        actual = bool(running.get(argument)) if isinstance(value, bool) else running.get(argument)
        if actual != value:
            flag = f"--{argument.replace('_', '-')}"
            return ConfigError(
                f"{KEY}.{name}: the server at {options.server_url} runs with {argument} = {actual!r} "
                f"instead of {value!r}",
                key=f"{KEY}.{name}",
                value=value,
                hint=f"restart the server with {flag} {value}, or set {KEY}.{name} to the server's value",
            )
    return None
