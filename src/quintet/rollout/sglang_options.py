"""What SGLang is started with: the engine's options under the names of the release that is installed."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.native import EngineConfig
from quintet.errors import ConfigError, MachineError, nearest

if TYPE_CHECKING:
    from quintet.rollout.engine import EngineSetup

__all__ = ["KEY", "OPTIONS", "RESERVED", "Option", "Release", "differing", "installed", "server_arguments"]

KEY = "rollout.engine_options"
WHERE = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("sglang")
place = list(spec.submodule_search_locations or [None])[0] if spec else None
print(json.dumps([place, importlib.metadata.version("sglang") if spec else None]))
"""
MARGIN = 8
"""Tokens of context that SGLang keeps to itself, at most."""


@dataclass(frozen=True, slots=True)
class Option:
    """What one of our options is called there: the first of `theirs` that a release has, or all of them."""

    theirs: tuple[str, ...]
    convert: Callable[[Any], Any] = lambda value: value
    """The value there; null leaves SGLang's own."""
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
    # after the number of tokens, which alone would switch it on
    "chunked_prefill": Option(("chunked_prefill_size",), lambda value: None if value else -1),
    "memory_share": Option(("mem_fraction_static",)),
    "offload": Option(("enable_memory_saver", "enable_weights_cpu_backup"), all=True),
    "pipeline_parallel": Option(("pp_size",)),
    "sleep_between_steps": Option(("enable_memory_saver",)),
    "tensor_parallel": Option(("tp_size",)),
    "torch_compile": Option(("enable_torch_compile",)),
    "torch_compile_max_batch": Option(("torch_compile_max_bs",)),
}
"""Our options that are arguments of SGLang's."""
ALWAYS = ("detokenize", "eager", "log_statistics")
"""Those that are told even where nobody set them: SGLang's own defaults are others."""
ELSEWHERE = frozenset(
    (
        *("arguments", "dtype", "max_model_tokens", "print_replies", "prompts_per_device"),
        *("server_python", "server_url", "server_weights_dir", "validate_weights", "validate_weights_dir"),
    )
)
"""Those that aren't: they are seen to here, or by who uses an engine."""

RESERVED: Mapping[str, str] = {
    "model_path": "policy.path",
    "tokenizer_path": "policy.tokenizer",
    "trust_remote_code": "policy.trust_remote_code",
    "random_seed": "seed",
    "dtype": f"{KEY}.dtype",
    "context_length": f"{KEY}.max_model_tokens",
    "max_running_requests": "rollout.max_concurrent",
    "skip_tokenizer_init": f"{KEY}.detokenize",
    "enable_memory_saver": f"{KEY}.sleep_between_steps",
    "host": f"{KEY}.server_url",
    "port": f"{KEY}.server_url",
    **dict.fromkeys(("api_key", "admin_api_key", "weight_version", "custom_sigquit_handler", "dp_size"), ""),
}
"""Arguments of SGLang's that follow from a key of ours, or from nothing that a user sets."""


@dataclass(frozen=True, slots=True)
class Release:
    """One SGLang."""

    name: str
    """`SGLang 0.5.23`."""
    arguments: frozenset[str]
    """Names of the fields of its `ServerArgs`."""


def installed(python: str | None = None) -> Release:
    """The SGLang of this environment, or of the one whose interpreter `python` is, read without importing it, which
    would take long and look for a device.

    Raises:
        ConfigError: there is no such interpreter.
        MachineError: there is no SGLang, or it isn't laid out as known.
    """
    place, version = _here() if python is None else _there(python)
    if place is None:
        raise MachineError(
            f"SGLang isn't installed {'here' if python is None else f'for {python}'}",
            hint=f"install it in an environment of its own (docs/sglang.md) and give {KEY}.server_python",
        )
    arguments = frozenset(_fields(Path(place, "srt")))
    if "model_path" not in arguments:
        raise MachineError(
            f"SGLang {version} in {place} has no ServerArgs as known", hint="take a release that is: pip install sglang"
        )
    return Release(f"SGLang {version}", arguments)


def _here() -> tuple[str | None, str]:
    """Where the package lies, and its version."""
    spec = importlib.util.find_spec("sglang")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return (places[0] if places else None), version


def _there(python: str) -> tuple[str | None, str]:
    """The same in another environment."""
    try:
        done = subprocess.run([python, "-c", WHERE], capture_output=True, text=True, check=True, timeout=60)  # noqa: S603
        place, version = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise ConfigError(
            f"{KEY}.server_python = {python!r} isn't a Python that runs: {said.splitlines()[-1]}",
            key=f"{KEY}.server_python",
            value=python,
            hint="give the path of bin/python of an environment that has SGLang",
        ) from error
    return place, str(version)


def _fields(package: Path) -> Iterator[str]:
    """Fields of `ServerArgs`: they stand in the class, or in newer releases in the classes that it is put together
    from."""
    for path in (package / "server_args.py", *sorted((package / "arg_groups" / "fields").glob("*.py"))):
        tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and (path.parent != package or node.name == "ServerArgs"):
                targets = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def server_arguments(setup: EngineSetup, release: Release) -> dict[str, Any]:
    """Fields of `ServerArgs` for what an engine is opened with.

    Raises:
        ConfigError: an option that SGLang, or this release of it, doesn't have.
        MachineError: the release lacks something that nothing goes without.
    """
    told = {
        "model_path": str(setup.directory),
        "trust_remote_code": setup.trust_remote_code,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "context_length": _context(setup),
        "max_running_requests": setup.slots,
        "random_seed": setup.seed,
        "weight_version": "0",
    }
    if lacking := sorted(told.keys() - release.arguments):
        raise MachineError(f"{release.name} has no argument {lacking[0]!r}", hint="pip install sglang==0.5.23")
    return told | asked(setup.options, release)


def _context(setup: EngineSetup) -> int:
    """SGLang keeps a few tokens to itself: where the model's own context has room for them, they are added."""
    own = getattr(setup.model.config, "max_position_embeddings", None)
    wanted = setup.context + MARGIN
    return wanted if own is None else max(setup.context, min(wanted, int(own)))


def asked(options: EngineConfig, release: Release) -> dict[str, Any]:
    """The options, as arguments of SGLang's.

    Raises:
        ConfigError: there is no such thing.
    """
    wanted = _set(options)
    for name in sorted(wanted - OPTIONS.keys()):
        raise _unknown(name, getattr(options, name), release)
    told: dict[str, Any] = {}
    for name in (name for name in OPTIONS if name in wanted or name in ALWAYS):
        told |= _arguments(name, getattr(options, name), release)
    return told | _further(options, release)


def _set(options: EngineConfig) -> set[str]:
    """Names of options that ask for something."""
    fields = type(options).model_fields
    default = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    return {name for name in fields.keys() - ELSEWHERE if getattr(options, name) != default[name]}


def _arguments(name: str, value: Any, release: Release) -> dict[str, Any]:
    option = OPTIONS[name]
    found = [one for one in option.theirs if one in release.arguments]
    if not found or (option.all and len(found) < len(option.theirs)):
        raise _unknown(name, value, release)
    converted = option.convert(value)
    return {} if converted is None else dict.fromkeys(found if option.all else found[:1], converted)


def _unknown(name: str, value: Any, release: Release) -> ConfigError:
    theirs = OPTIONS[name].theirs if name in OPTIONS else ()
    called = f", known as {' or '.join(theirs)} in others" if theirs else ""
    return ConfigError(
        f"{KEY}.{name} = {value!r}: {release.name} has no such option{called}",
        key=f"{KEY}.{name}",
        value=value,
        hint="leave it out, or take another engine",
    )


def _further(options: EngineConfig, release: Release) -> dict[str, Any]:
    """What is handed on under SGLang's own names."""
    for name, value in options.arguments.items():
        key = f"{KEY}.arguments.{name}"
        if name in RESERVED:
            instead = f"give {RESERVED[name]}" if RESERVED[name] else "leave it out"
            raise ConfigError(f"{key}: Quintet sets {name} itself", key=key, value=value, hint=instead)
        if name not in release.arguments:
            close = nearest(name, release.arguments)
            raise ConfigError(
                f"{key}: {release.name} has no argument {name!r}",
                key=key,
                value=value,
                hint=f"did you mean {close!r}?" if close else "leave it out",
            )
    return dict(options.arguments)


def differing(options: EngineConfig, running: Mapping[str, Any], release: Release) -> ConfigError | None:
    """Why a server that runs already isn't what the options ask for; null where it is.

    Raises:
        ConfigError: an option that it doesn't have.
    """
    wanted: dict[str, tuple[str, Any]] = {}
    for name in _set(options) & OPTIONS.keys():
        wanted |= {theirs: (name, value) for theirs, value in _arguments(name, getattr(options, name), release).items()}
    wanted |= {name: (f"arguments.{name}", value) for name, value in _further(options, release).items()}
    for theirs, (name, value) in sorted(wanted.items()):
        there = bool(running.get(theirs)) if isinstance(value, bool) else running.get(theirs)
        if there != value:
            return ConfigError(
                f"{theirs} should be {value!r}, and the server at {options.server_url} has {there!r}",
                key=f"{KEY}.{name}",
                value=value,
                hint=f"start it so (--{theirs.replace('_', '-')}), or give {KEY}.{name} what it has",
            )
    return None
