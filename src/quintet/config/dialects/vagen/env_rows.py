"""VAGEN's Parquet files of start states: each row names an environment, its configuration and a seed."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.arrow_values import checked
from quintet.config.dialects.vagen.key_values import ENV
from quintet.config.dotted import get_value
from quintet.errors import ConfigError

TRAIN_FILES, TEST_FILES = "data.train_files", "data.val_files"
SIZES = {TRAIN_FILES: "train_size", TEST_FILES: "test_size"}
"""Size in a section of `env_config.yaml` by the key of the files that have it."""
MAX_SEED = 1 << 48


@dataclass(frozen=True, slots=True)
class EnvRow:
    """Start state of an environment."""

    env_name: str
    env_config: str
    """The configuration as JSON with sorted keys, without null."""
    seed: int
    source: str
    """File and number of the row."""

    @property
    def options(self) -> dict[str, Any]:
        """The configuration."""
        options: dict[str, Any] = json.loads(self.env_config)
        return options


def existing_files(files: Any) -> list[Path]:
    """Return the files of a key, if all of them exist; none for values that are not file names."""
    names = [files] if isinstance(files, str) else list(files) if isinstance(files, Sequence) else []
    paths = [Path(name).expanduser() for name in names if isinstance(name, str)]
    return paths if paths and len(paths) == len(names) and all(path.is_file() for path in paths) else []


def read_env_rows(paths: Iterable[Path], key: str) -> list[EnvRow]:
    """Return the rows of Parquet files; `key` is the configuration key that names them.

    Raises:
        ConfigError: a file cannot be read, or a row lacks a field or has another form.
    """
    return [row for path in paths for row in _read_file(path, key)]


def _read_file(path: Path, key: str) -> Iterator[EnvRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = checked(pq.read_table(path, columns=["extra_info"]).column("extra_info")).to_pylist()
    except (OSError, pa.ArrowException, KeyError, ValueError, OverflowError) as error:
        hint = "a row has extra_info with env_name, env_config and seed; quintet data envs writes such files"
        message = f"{key}: {path} is no Parquet file of start states: {str(error).splitlines()[0]}"
        raise ConfigError(message, key=key, value=str(path), hint=hint) from error
    for number, row in enumerate(rows):
        yield _row(row, f"{path}, row {number}", key)


def _row(info: Any, source: str, key: str) -> EnvRow:
    fields = info if isinstance(info, Mapping) else {}
    name, config, seed = (fields.get(field) for field in ("env_name", "env_config", "seed"))
    config = _without_null(json.loads(config) if isinstance(config, str) and config.startswith("{") else config or {})
    checks = {
        "env_name": isinstance(name, str) and name != "",
        "env_config": isinstance(config, Mapping),
        "seed": isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < MAX_SEED,
    }
    for field, is_valid in checks.items():
        if not is_valid:
            valid = {"env_name": "the name of an environment", "env_config": "a mapping", "seed": "a number from 0"}
            message = f"{source}: extra_info.{field} = {fields.get(field)!r:.60} is not {valid[field]}"
            raise ConfigError(message, key=key, source=source, hint="write the file again: quintet data envs")
    return EnvRow(str(name), json.dumps(config, sort_keys=True, ensure_ascii=False), int(seed or 0), source)


def _without_null(value: Any) -> Any:
    """Remove the null fields that a column of several environments gives every row."""
    if isinstance(value, Mapping):
        return {name: _without_null(item) for name, item in value.items() if item is not None}
    return value


def sections_of_rows(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a section for each environment in the existing files of a configuration, unless it has sections, by
    their source.

    Raises:
        ConfigError: see `read_env_rows`.
    """
    if any(isinstance(section, Mapping) and "env_name" in section for section in tree.values()):
        return {}
    files = {key: existing_files(get_value(tree, key)) for key in SIZES}
    counts: dict[tuple[str, str], Counter[str]] = {}
    for key, paths in files.items():
        for row in read_env_rows(paths, key):
            counts.setdefault((row.env_name, row.env_config), Counter())[key] += 1
    sections = {
        f"{ENV.rstrip('0123456789')}{number}": {
            "env_name": name,
            "env_config": json.loads(options),
            **{size: rows[key] for key, size in SIZES.items() if files[key]},
        }
        for number, ((name, options), rows) in enumerate(counts.items(), 1)
    }
    return {"files of start states": sections}
