"""If these fail, a hint about data leads nowhere: somebody follows it and gets the same error again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import test_conversation_hints
import test_generation_hints
import test_image_hints
import test_response_file
import test_robot_hints
from data_directory import fill
from hint_cases import HintCase, case, name_of, sites_without_case
from test_conversation_hints import tokenizer

from quintet.config.compose import load_experiment
from quintet.config.native.data import DataConfig
from quintet.data.data_files import resolve_files, write_atomically
from quintet.data.prompt_dataset import PromptDataset, iter_training_texts
from quintet.data.prompt_source import open_rows, open_split_files
from quintet.data.prompt_split import PromptSplit
from quintet.data.row_order import RowOrder, RowSampler
from quintet.data.row_reader import RowReader
from quintet.data.tables import open_table

CACHE = Path("cache")


def files_of(names: Sequence[str]) -> None:
    resolve_files(names, "data.train_files", CACHE)


def remote_file(name: str) -> None:
    """Copy a file from a store in memory."""
    fsspec.filesystem("memory").pipe_file("/data/a.jsonl", b"{}")
    files_of([name])


def written(path: str) -> None:
    write_atomically(Path(path), lambda temporary: temporary.write_text(""))


def rows_of(files: Mapping[str, str]) -> None:
    """Write files, and read their rows."""
    for name, text in files.items():
        Path(name).write_text(text)
    open_rows(list(files), "data.train_files", "cache")


def rows_in(content: bytes | None) -> None:
    """Read a Parquet file with this content, or one that was written by pyarrow."""
    Path("table.parquet").write_bytes(content or Path("data/train.parquet").read_bytes())
    open_rows(["table.parquet"], "data.train_files", "cache")


def table(name: str) -> None:
    open_table(Path(name), "data.train_files", CACHE)


def read(**settings: Any) -> Callable[[Mapping[str, Any]], None]:
    """The prompt of a row."""
    return lambda row: RowReader(DataConfig(train_files=("x",), **settings)).read(row, 0, "row 0") and None


def rows_to_answer(rows: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    for messages in rows:
        read()({"prompt": messages})


def column(name: str) -> None:
    read(prompt_key=name)({"question": "1 + 1 = ?"})


def split_files(settings: Mapping[str, Any]) -> None:
    """Read the first row of a split, which may be that of a user's class."""
    config = DataConfig(**settings)
    open_split_files(config, None, config.train_files, "data.train_files").rows[0]


def sampled(settings_and_limit: tuple[Mapping[str, Any], int]) -> None:
    settings, limit = settings_and_limit
    PromptSplit.from_config(DataConfig(**settings), tokenizer(), limit).create_sampler()


def held_out(settings: Mapping[str, Any]) -> None:
    PromptSplit.from_config(DataConfig(**settings), tokenizer(), 400).check_domains(10)


def prompts_of(overrides: list[str]) -> None:
    PromptDataset.from_config(load_experiment(None, overrides).experiment, tokenizer())


def named_prompt(overrides: list[str]) -> None:
    """A prompt of a row that is for an agent loop with tools."""
    Path("named.jsonl").write_text('{"prompt": "1 + 1 = ?", "agent_name": "tool_agent"}\n')
    overrides = ["env.name=prompts", "data.train_files=[named.jsonl]", *overrides]
    PromptDataset.from_config(load_experiment(None, overrides).experiment, tokenizer())[0]


def preset_texts(overrides: list[str]) -> None:
    """The texts from which the tokenizer of a preset is made."""
    config = load_experiment(None, overrides).experiment
    if config.policy.preset and config.data:
        list(iter_training_texts(config.data))


def ordered(sizes_and_weights: tuple[Sequence[int], Sequence[float]]) -> None:
    RowOrder(*sizes_and_weights, shuffle=False, seed=0)


def taken(rows_and_batch: tuple[int, int]) -> None:
    RowSampler(RowOrder([rows_and_batch[0]], shuffle=False, seed=0)).take(rows_and_batch[1])


def resumed(size: int) -> None:
    RowSampler(RowOrder([size], shuffle=False, seed=0)).load(RowSampler(RowOrder([4], shuffle=False, seed=0)).state())


ROW = '{"prompt": "1 + 1 = ?"}\n'
ONE: Mapping[str, Any] = {"train_files": ("rows.jsonl",)}
FILTERED = {**ONE, "filter_long_prompts": True}
UNKNOWN, ANY = ({**ONE, "domains": {"a": {"sources": (source,), "share": 1.0}}} for source in ("zzz", "*"))
WEIGHTED = {**FILTERED, "train_files": ("rows.jsonl", "long.jsonl"), "weights": (1.0, 1.0)}
PROMPTS = ["env.name=prompts", "data.train_files=[rows.jsonl]"]
TEXTS, MAPPINGS = {**ONE, "dataset_class": "sets.py:Texts"}, {**ONE, "dataset_class": "sets.py:Mappings"}
MESSAGE = {"role": "user", "content": "2"}
IMAGE = {"role": "user", "content": [{"type": "image"}]}
CASES = [
    # files
    case(files_of, ["rows.json"], "did you mean", ["rows.jsonl"]),
    case(files_of, ["odd[1]/zzzzz.jsonl"], "* ? and [ make a pattern: write ", ["odd[[]1]/rows.jsonl"]),
    case(files_of, ["data"], "name files in it, such as data/*.parquet", ["data/*.parquet"]),
    case(files_of, ["zzz://x/a.jsonl"], "install the missing package (", ["rows.jsonl"]),
    case(remote_file, "memory://data/b.jsonl", "copy the file to this machine and set data.train_files", "rows.jsonl"),
    case(remote_file, "memory://data/b*", "correct the pattern, such as memory://data/*", "memory://data/*"),
    case(written, "/proc/no/x", "use another directory", "new/x"),
    # rows
    case(rows_of, {"a.txt": ROW}, "supported file suffixes: .parquet, .json, .jsonl, .csv", {"a.jsonl": ROW}),
    case(rows_of, {"a.jsn": ROW}, "did you mean .json? supported", {"a.json": ROW}),
    case(rows_of, {"a.jsonl": ROW + "{"}, "fix or remove that row", {"a.jsonl": ROW}),
    case(rows_of, {"a.jsonl": ""}, "use a file with rows", {"a.jsonl": ROW}),
    case(table, "gone.jsonl", "check that the file is complete and readable", "rows.jsonl"),
    case(rows_in, b"PAR1", "write the file again", None),
    case(column, "questio", "did you mean question? columns: question", "question"),
    case(read(), {"prompt": 5}, "it must be text or a list of chat messages", {"prompt": "5"}, {"prompt": [MESSAGE]}),
    case(read(), {"prompt": ["a"]}, 'a message is {"role": "user", "content": "…"}', {"prompt": [MESSAGE]}),
    case(read(), {"prompt": [IMAGE]}, "remove images, or write them as ", {"prompt": [MESSAGE]}),
    case(read(image_key="x"), {"prompt": [IMAGE]}, "remove images, or write them as ", {"prompt": [IMAGE], "x": [1]}),
    case(
        read(image_key="x"),
        {"prompt": "<image>", "x": [1, 2]},
        "write <image> once for each image, or nowhere",
        {"prompt": "<image> <image>", "x": [1, 2]},
        {"prompt": "a", "x": [1, 2]},
    ),
    case(
        read(),
        {"prompt": "a", "agent_name": "react_agent"},
        "known: single_turn_agent, tool_agent; or data.agent_loop_key=null",
        {"prompt": "a", "agent_name": "tool_agent"},
        {"prompt": "a", "agent_name": None},
    ),
    case(
        read(),
        {"prompt": "a", "data_source": ["gsm8k"]},
        "a name is text; name another column",
        {"prompt": "a", "data_source": "gsm8k"},
    ),
    case(rows_to_answer, [[MESSAGE], []], "remove that row", [[MESSAGE]]),
    # prompts
    case(sampled, (FILTERED, 3), "at least: rollout.max_prompt_tokens=17", (FILTERED, 17)),
    case(
        sampled,
        (WEIGHTED, 40),
        "remove that file and its weight, or increase data.train_rows or rollout.max_prompt_tokens",
        ({**FILTERED, "weights": (1.0,)}, 40),
        (WEIGHTED, 400),
    ),
    case(sampled, (UNKNOWN, 400), "add rows of its `sources` (zzz), or lower its `share`", (ANY, 400)),
    case(held_out, UNKNOWN, "add its data source to `sources` of a domain, or '*' for all other sources", ANY),
    case(split_files, {"train_files": ()}, "name files: data.train_files=[…]", ONE),
    case(split_files, TEXTS, "return a mapping from column names to values", MAPPINGS),
    case(split_files, {**MAPPINGS, "weights": (1.0,)}, "remove data.weights", MAPPINGS),
    case(prompts_of, [], "env.name=prompts data.train_files=[FILE]", PROMPTS),
    case(
        named_prompt,
        [],
        "name the tools in rollout.tool_calls, or set data.agent_loop_key=null",
        ["rollout.tool_calls.tools={calculator: {}}", "rollout.max_turns=5"],
        ["data.agent_loop_key=null"],
    ),
    case(
        named_prompt,
        ["rollout.interactions.users={gsm8k: {}, other: {user: gsm8k}}"],
        "name one of these users, or rollout.interactions=null",
        ["rollout.interactions.users={gsm8k: {}}"],
    ),
    case(preset_texts, [*PROMPTS, "data.dataset_class=sets.py:Mappings"], "policy.path=DIRECTORY policy.preset=null"),
    # their order
    case(ordered, ([3, 4], [1.0]), "set one weight per entry of data.train_files", ([3, 4], [1.0, 1.0])),
    case(ordered, ([0], []), "name files with rows", ([3], [])),
    case(ordered, ([3, 4], [1.0, 1e-9]), "remove that weight and its file", ([3], [1.0])),
    case(taken, (3, 4), "at most: training.groups_per_step=3, or add rows", (3, 3), (4, 4)),
    case(resumed, 5, "restore the old value, or start a new run with resume=never", 4),
]
EXEMPT = {
    "data/lazy_conversations.py batch": "test_sft_lazy_rows.py raises it for rows of which nothing is left",
    "data/tasks/reasoning_gym.py _check_serializable": "all generators here can be stored",
    "data/worker_pool.py result": "the hint of an error in a worker process, which test_prompt_split.py raises",
    "data/start_state_files.py": "files of VAGEN, which test_start_state_files.py reads",
}


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_directory: Path) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, policy_directory)


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_about_data_removes_its_error(entry: HintCase) -> None:
    entry.check()


def test_every_hint_about_data_is_followed() -> None:
    others = (test_conversation_hints, test_generation_hints, test_image_hints, test_response_file, test_robot_hints)
    cases = [*CASES, *(case for module in others for case in module.CASES)]
    assert not sites_without_case("data", cases, EXEMPT)
