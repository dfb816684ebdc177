"""Worker processes that read rows and tokenize prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quintet.config.native.data import DataConfig
from quintet.data.prompt_source import PromptRows, PromptSettings
from quintet.data.row_images import PromptImages
from quintet.data.worker_pool import WorkerPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROWS_PER_REQUEST: Final = 256
"""Rows per request for prompt lengths."""


class PromptWorkers(WorkerPool):
    """Workers that tokenize the prompts of a dataset, to measure their lengths or ahead of their use."""

    def __init__(self, count: int, settings: PromptSettings, *, trust_remote_code: bool = False) -> None:
        """`trust_remote_code` is the tokenizer's."""
        images = settings.images
        setup = {
            "config": settings.config.model_dump(mode="json"),
            "trust_remote_code": trust_remote_code,
            "max_prompt_tokens": settings.max_prompt_tokens,
            "split": settings.split,
            "tools": list(settings.tools),
            "users": list(settings.users),
            "images": None if images is None else [type(images).__module__, type(images).__name__, images.settings()],
        }
        super().__init__(_create_handler, setup, count, settings.tokenizer)
        self.count = count
        self._pending_rows: deque[tuple[int, ...]] = deque()

    def iter_lengths(self, rows: int) -> Iterator[int]:
        """Yield the number of tokens of each untruncated prompt, in order."""
        chunks = (
            {"lengths": [start, min(start + ROWS_PER_REQUEST, rows)]} for start in range(0, rows, ROWS_PER_REQUEST)
        )
        for lengths in self.map(chunks):
            yield from lengths

    def is_pending(self, row: int) -> bool:
        """Return whether a row's prompt was requested and not received yet."""
        return any(row in requested for requested in self._pending_rows)

    def request_tokens(self, numbers: Mapping[int, int]) -> None:
        """Request the prompts of rows; `numbers` maps them to row numbers over all files."""
        rows = list(numbers)
        for worker in range(min(self.count, len(rows))):
            shard = tuple(rows[worker :: self.count])
            self.submit({"tokens": [numbers[row] for row in shard]})
            self._pending_rows.append(shard)

    def receive_tokens(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Return rows and prompts of the oldest request.

        Raises:
            UserError: a prompt cannot be created.
        """
        rows = self._pending_rows.popleft()
        return zip(rows, map(tuple, self.result()), strict=True)


def _load_tokenizer(directory: str, *, trust_remote_code: bool) -> PreTrainedTokenizerFast:
    if (Path(directory) / "tokenizer.json").is_file() and not trust_remote_code:
        from transformers import PreTrainedTokenizerFast

        # loads any such file; AutoTokenizer would import all of transformers and torch
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)


def _load_images(setup: tuple[str, str, Mapping[str, Any]] | None) -> PromptImages | None:
    """Build the converter of images in this process, from its class and settings."""
    if setup is None:
        return None
    module, name, settings = setup
    images: PromptImages = getattr(import_module(module), name).from_settings(settings)
    return images


def _create_handler(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    tokenizer = _load_tokenizer(setup["tokenizer"], trust_remote_code=setup["trust_remote_code"])
    tokenizer.name_or_path = setup["tokenizer_name"]
    config = DataConfig.model_validate(setup["config"])
    images, limit = _load_images(setup["images"]), setup["max_prompt_tokens"]
    source = PromptRows(
        PromptSettings(config, tokenizer, limit, setup["split"], images, setup["tools"], setup["users"])
    )

    def handle(request: Mapping[str, Any]) -> list[Any]:
        if "lengths" in request:
            return [source.num_tokens(number) for number in range(*request["lengths"])]
        return [source.tokens(source[number]) for number in request["tokens"]]

    return handle
