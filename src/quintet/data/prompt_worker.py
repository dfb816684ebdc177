"""A process that reads rows and makes prompts of them; see `processes.serve`."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quintet.config.native.data import DataConfig
from quintet.data.processes import Processes, serve
from quintet.data.source import Source, SplitName

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["PromptWorkers"]

MODULE: Final = "quintet.data.prompt_worker"
CHUNK: Final = 256
"""Rows whose prompts are measured for one request."""


class PromptWorkers(Processes):
    """Processes that know a data set: they measure its prompts, or make them before they are wanted."""

    def __init__(
        self,
        count: int,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerFast,
        max_prompt_tokens: int,
        split: SplitName,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        # as it is in memory, chat template included
        self._copy = tempfile.TemporaryDirectory(prefix="quintet-tokenizer-")
        tokenizer.save_pretrained(self._copy.name)
        setup = {
            "config": config.model_dump(mode="json"),
            "tokenizer": self._copy.name,
            "trust_remote_code": trust_remote_code,
            "max_prompt_tokens": max_prompt_tokens,
            "split": split,
        }
        super().__init__(MODULE, setup, count)
        self.count = count
        self._pending: deque[tuple[int, ...]] = deque()

    def lengths(self, rows: int) -> Iterator[int]:
        """Tokens of each whole prompt, in order."""
        chunks = ({"lengths": [start, min(start + CHUNK, rows)]} for start in range(0, rows, CHUNK))
        for lengths in self.map(chunks):
            yield from lengths

    def awaits(self, row: int) -> bool:
        """Whether a row's prompt was asked for and hasn't come."""
        return any(row in asked for asked in self._pending)

    def ask_tokens(self, numbers: Mapping[int, int]) -> None:
        """Ask for the prompts of rows, each told by its number over all files."""
        rows = list(numbers)
        for first in range(min(self.count, len(rows))):
            part = tuple(rows[first :: self.count])
            self.ask({"tokens": [numbers[row] for row in part]})
            self._pending.append(part)

    def next_tokens(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Rows and prompts of the oldest request.

        Raises:
            UserError: one can't be made.
        """
        rows = self._pending.popleft()
        return zip(rows, map(tuple, self.answer()), strict=True)

    def close(self) -> None:
        """End them all."""
        super().close()
        self._copy.cleanup()


def _tokenizer(directory: str, *, trust_remote_code: bool) -> PreTrainedTokenizerFast:
    if (Path(directory) / "tokenizer.json").is_file() and not trust_remote_code:
        from transformers import PreTrainedTokenizerFast

        # the class that reads all such files; to find the very one, all of transformers and torch would be loaded
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)


def _prepare(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    tokenizer = _tokenizer(setup["tokenizer"], trust_remote_code=setup["trust_remote_code"])
    config = DataConfig.model_validate(setup["config"])
    source = Source(config, tokenizer, setup["max_prompt_tokens"], setup["split"])

    def answer(request: Mapping[str, Any]) -> list[Any]:
        if "lengths" in request:
            return [source.length(number) for number in range(*request["lengths"])]
        return [source.tokens(source[number]) for number in request["tokens"]]

    return answer


if __name__ == "__main__":
    serve(_prepare)
