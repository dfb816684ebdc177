"""All rows of a split, and their prompts, before filtering."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from quintet.config.native.data import DataConfig
from quintet.data.data_files import cache_directory, resolve_files
from quintet.data.prompt_format import PromptFormat, ToolSchema
from quintet.data.row_images import PromptImages, RowImage
from quintet.data.row_reader import RowReader
from quintet.data.tables import ConcatenatedRows, open_table
from quintet.errors import ConfigError
from quintet.records import PromptRow
from quintet.registry import load_user_object
from quintet.tools.users import user_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SplitName = Literal["train", "validation"]
CLASS_KEY = "data.dataset_class"


def open_rows(names: Sequence[str], key: str, cache_dir: str | None = None) -> tuple[ConcatenatedRows, tuple[int, ...]]:
    """Return the rows of the named files and the number of rows per name; `key` is the configuration key.

    Raises:
        ConfigError: a file is missing, empty, unreadable or of an unknown type.
        MachineError: a file cannot be copied, or the cache cannot be written.
    """
    cache = cache_directory(cache_dir)
    files = resolve_files(names, key, cache)
    tables = [[open_table(path, key, cache) for path in paths] for paths in files]
    return ConcatenatedRows(list(itertools.chain(*tables))), tuple(
        sum(len(table) for table in tables_of_name) for tables_of_name in tables
    )


class RowSource(Protocol):
    """Rows by number; `describe_row` returns a row's file and line, `directory` that in which its images are."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Mapping[str, Any]: ...

    def describe_row(self, number: int) -> str: ...

    def directory(self, number: int) -> Path: ...


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows of a split; see `open_split`."""

    names: tuple[str, ...]
    key: str
    """Configuration key that names the files."""
    rows: RowSource
    sizes: tuple[int, ...]
    """Number of rows per file."""


def open_split(config: DataConfig, tokenizer: Any, split: SplitName) -> SplitRows:
    """Return the rows of a split; the training rows if there are no validation files. See `open_split_files`."""
    if split == "validation" and config.validation_files:
        return open_split_files(config, tokenizer, config.validation_files, "data.validation_files")
    return open_split_files(config, tokenizer, config.train_files, "data.train_files")


def open_split_files(config: DataConfig, tokenizer: Any, names: Sequence[str], key: str) -> SplitRows:
    """Return the rows of the files that `key` names, or of the user-defined dataset that is created from them.

    Raises:
        ConfigError: no file is named, one does not exist or cannot be read, or the dataset cannot be created.
        MachineError: a file cannot be copied, or the cache cannot be written.
    """
    if not names:
        raise ConfigError(f"{key} is empty", key=key, hint=f"name files: {key}=[…]")
    if config.dataset_class is None:
        return SplitRows(tuple(names), key, *open_rows(names, key, config.cache_dir))
    rows = _load_custom_rows(config, names, tokenizer)
    return SplitRows(tuple(names), key, rows, (len(rows),))


class _CustomRows:
    """Rows of a user-defined dataset."""

    def __init__(self, rows: Any, name: str, directory: Path) -> None:
        self._rows = rows
        self._name = name
        self._directory = directory

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        row = self._rows[number]
        if not isinstance(row, Mapping):
            message = f"{CLASS_KEY} = {self._name}: row {number} is a {type(row).__name__}, not a mapping"
            raise ConfigError(
                message, key=CLASS_KEY, value=self._name, hint="return a mapping from column names to values"
            )
        return row

    def describe_row(self, number: int) -> str:
        return f"{self._name}, row {number}"

    def directory(self, _number: int) -> Path:
        return self._directory


def _load_custom_rows(config: DataConfig, names: Sequence[str], tokenizer: Any) -> _CustomRows:
    """Create the user's dataset with `(data_files, tokenizer, config)`."""
    name = str(config.dataset_class)
    if config.weights:
        message = f"data.weights cannot be combined with {CLASS_KEY} = {name}"
        raise ConfigError(message, key="data.weights", value=list(config.weights), hint="remove data.weights")
    dataset = load_user_object(name, CLASS_KEY)(list(names), tokenizer, config)
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(dataset, method)]
    if missing:
        raise ConfigError(f"{CLASS_KEY} = {name} does not define {' and '.join(missing)}", key=CLASS_KEY, value=name)
    return _CustomRows(dataset, name, Path(names[0]).expanduser().parent)


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """Settings that decide the prompts of a split."""

    config: DataConfig
    tokenizer: PreTrainedTokenizerFast
    max_prompt_tokens: int
    split: SplitName
    images: PromptImages | None = None
    """Converts images; None if the policy reads none."""
    tools: Sequence[ToolSchema] = ()
    """Tools that are described to the policy."""
    users: Collection[str] = ()
    """Names of simulated users."""


class PromptRows:
    """Prompts by row number over all files."""

    def __init__(self, settings: PromptSettings) -> None:
        """Open the rows.

        Raises:
            ConfigError: files, columns or the chat template do not match the configuration.
            MachineError: a file cannot be copied, or the cache cannot be written.
        """
        config = settings.config
        split_rows = open_split(config, settings.tokenizer, settings.split)
        self.names, self.sizes, self._rows = split_rows.names, split_rows.sizes, split_rows.rows
        self._reader = RowReader(config)
        self._prompt_format = PromptFormat(
            settings.tokenizer,
            config.template,
            max_tokens=settings.max_prompt_tokens,
            truncation=config.truncation,
            images=settings.images,
            tools=settings.tools,
        )
        self._has_images = config.image_key is not None
        self._has_tools, self._users = bool(settings.tools), settings.users

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> PromptRow:
        """
        Raises:
            ConfigError: the row cannot be read, a column is missing, or it needs tools or a user that there are not.
        """
        location = self._rows.describe_row(number)
        prompt_row = self._reader.read(self._rows[number], number, location)
        if prompt_row.agent_loop == "tool_agent" and not self._has_tools and not self._users:
            raise _missing_tools(location)
        if self._users and prompt_row.has_replies:
            name = user_name(prompt_row.extra, self._users)
            if name not in self._users:
                raise _missing_user(location, name, self._users)
        return prompt_row

    def source_row(self, number: int) -> Mapping[str, Any]:
        """Return all columns of a row."""
        return self._rows[number]

    def domain(self, number: int) -> str | None:
        """Return the domain of a row, None if it belongs to none."""
        return self._reader.domain(self._rows[number])

    def describe_row(self, number: int) -> str:
        """Return a row's file and number in it."""
        return self._rows.describe_row(number)

    def text(self, prompt_row: PromptRow) -> str:
        """Return a prompt as text, with the chat template applied."""
        return self._prompt_format.text(prompt_row)

    def tokens(self, prompt_row: PromptRow) -> tuple[int, ...]:
        """Return a prompt's tokens, truncated according to `data.truncation`.

        Raises:
            ConfigError: an image cannot be read; or the prompt is too long and `data.truncation` is `error`, or would
                remove an image.
        """
        number = prompt_row.id
        return self._prompt_format.tokens(prompt_row, self._rows.describe_row(number), self.images(number))

    def images(self, number: int) -> tuple[RowImage, ...]:
        """Return the images of a row, unread."""
        if not self._has_images:
            return ()
        return self._reader.images(self._rows[number], self._rows.describe_row(number), self._rows.directory(number))

    def num_tokens(self, number: int) -> int:
        """Return the number of tokens of a row's untruncated prompt."""
        location = self._rows.describe_row(number)
        return len(self._prompt_format.untruncated_tokens(self[number], location, self.images(number)))


def _missing_tools(location: str) -> ConfigError:
    key = "data.agent_loop_key"
    message = (
        f"{key}: {location} is for tool_agent, and the run has no tools (rollout.tool_calls) and no simulated users"
    )
    hint = f"name the tools in rollout.tool_calls, or set {key}=null to answer each prompt with one response"
    return ConfigError(message, key=key, source=location, hint=hint)


def _missing_user(location: str, name: Any, users: Collection[str]) -> ConfigError:
    key = "rollout.interactions.users"
    named = "does not name its user" if name is None else f"names the user {name!r:.60}, which there is not"
    message = f"{key}: {location} {named}, as `name` in extra_info.interaction_kwargs; users: {', '.join(users)}"
    hint = "name one of these users, or rollout.interactions=null"
    return ConfigError(message, key=key, value=name, source=location, hint=hint)
