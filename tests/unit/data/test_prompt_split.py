"""If these fail, a run trains on rows that it should leave out, or on other prompts than its rows'."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from quintet.config.native.data import DataConfig
from quintet.data import prompt_split
from quintet.data.prompt_split import PromptSplit
from quintet.data.worker_pool import WorkerPool
from quintet.errors import ConfigError, MachineError
from quintet.policies.tiny_models import train_tokenizer


@cache
def tokenizer() -> Any:
    return train_tokenizer(320, ["user 2 + 3 = 5", "assistant"])


def rows(path: Path, count: int, words: int = 1) -> str:
    lines = ({"prompt": " ".join([f"{path.stem} {n}"] * words), "answer": str(n)} for n in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def questions(*files: str, limit: int = 200, split: Any = "train", seed: int = 5, **config: Any) -> PromptSplit:
    return PromptSplit.from_config(DataConfig(train_files=files, **config), tokenizer(), limit, split, seed)


def truths(actual: PromptSplit) -> list[Any]:
    return [question.ground_truth for question in actual]


def test_rows_as_questions_and_prompts(tmp_path: Path) -> None:
    actual = questions(rows(tmp_path / "a.jsonl", 4))
    assert len(actual) == 4
    assert truths(actual) == ["0", "1", "2", "3"]
    assert tokenizer().decode(actual.prompt(2)) == "<|im_start|>user\na 2<|im_end|>\n<|im_start|>assistant\n"
    assert actual.prompt(2) is actual.prompt(2)


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    short, long = rows(tmp_path / "short.jsonl", 3), rows(tmp_path / "long.jsonl", 2, words=40)
    actual = questions(short, long, short, limit=60, filter_long_prompts=True)
    assert (len(actual), actual.num_filtered, actual.sizes) == (6, 2, (3, 0, 3))
    assert [question.id for question in actual] == [0, 1, 2, 5, 6, 7]
    assert max(len(actual.prompt(row)) for row in range(6)) <= 60
    with pytest.raises(ConfigError, match=r"long.jsonl, row 0 has \d+ tokens"):
        questions(short, long, limit=60).prompt(3)
    assert len(questions(short, long, limit=60, truncation="middle").prompt(3)) == 60
    with pytest.raises(ConfigError, match="leaves no rows"):
        questions(long, limit=60, filter_long_prompts=True)
    with pytest.raises(ConfigError, match=r"long.jsonl is used") as caught:
        questions(short, long, limit=60, filter_long_prompts=True, weights=(1.0, 1.0)).create_sampler()
    assert caught.value.key == "data.weights"


def test_filtering_does_not_depend_on_the_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_split, "MIN_ROWS_PER_WORKER", 1)
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("".join(json.dumps({"prompt": "x " * (n % 37)}) + "\n" for n in range(600)))
    one = questions(str(mixed), limit=30, filter_long_prompts=True)
    two = questions(str(mixed), limit=30, filter_long_prompts=True, filter_workers=2)
    assert 0 < len(one) < 600
    assert [question.id for question in one] == [question.id for question in two]


def test_as_many_processes_filter_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Workers(nullcontext):  # type: ignore[type-arg]
        def __init__(self, count: int, **_: Any) -> None:
            super().__init__(self)
            started.append(count)

        def iter_lengths(self, count: int) -> Iterator[int]:
            return iter(range(count))

    monkeypatch.setattr(prompt_split, "MIN_ROWS_PER_WORKER", 1)
    monkeypatch.setattr(prompt_split, "PromptWorkers", Workers)
    path = rows(tmp_path / "a.jsonl", 9)
    assert len(questions(path, limit=4, filter_long_prompts=True, filter_workers=3)) == 5
    assert started == [3]


def test_user_errors_in_workers_are_raised_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_split, "MIN_ROWS_PER_WORKER", 1)
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"prompt": "a"}\n' * 3 + '{"promt": "a"}\n')
    with pytest.raises(ConfigError, match="row 3 has no such column") as caught:
        questions(str(wrong), filter_long_prompts=True, filter_workers=2)
    assert caught.value.key == "data.prompt_key"
    assert "did you mean promt" in str(caught.value)


@pytest.mark.parametrize(
    ("create_handler", "setup", "problem"),
    [
        (os._exit, 3, "its process ended with status 3"),
        (signal.raise_signal, signal.SIGKILL, r"its process died of SIGKILL \(out of memory\?\)"),
        (json.loads, {}, "TypeError: the JSON object must be str"),
    ],
)
def test_a_dead_or_defective_worker_is_reported(create_handler: Any, setup: Any, problem: str) -> None:
    with WorkerPool(create_handler, setup, 1) as some, pytest.raises(MachineError, match=problem):
        list(some.map([{}]))


def test_prompts_tokenized_by_workers_are_the_same(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", 40)
    here, there = questions(path), questions(path, workers=2)
    try:
        for batch in ([3, 1, 20, 7], [0], [39, 38, 3]):
            there.prepare(batch)
        assert [there.prompt(row) for row in range(40)] == [here.prompt(row) for row in range(40)]
        there.prepare([5, 6])
    finally:
        there.close()
    assert there.prompt(5) == here.prompt(5)
    here.prepare([1, 2])


def test_prepared_prompts_are_not_tokenized_by_the_main_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows(tmp_path / "a.jsonl", 4)
    here, there = questions(path), questions(path, workers=1)
    monkeypatch.setattr(there._source, "tokens", lambda _: pytest.fail("the main process has tokenized a prompt"))
    try:
        there.prepare([2])
        assert there.prompt(2) == here.prompt(2)
    finally:
        there.close()


def test_the_configured_template_renders_prompts(tmp_path: Path) -> None:
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    assert tokenizer().decode(questions(rows(tmp_path / "a.jsonl", 3), template=template).prompt(2)) == "<a 2>"


def test_some_rows_are_drawn_once(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", 30)
    actual = truths(questions(path, train_rows=10))
    assert len(set(actual)) == 10
    assert actual != [str(n) for n in range(10)]
    assert actual == truths(questions(path, train_rows=10))
    assert actual != truths(questions(path, train_rows=10, seed=6))
    own_seed = DataConfig(train_files=(path,), train_rows=10, seed=5)
    assert actual == truths(PromptSplit.from_config(own_seed, tokenizer(), 200, seed=6))
    assert len(questions(path, train_rows=99)) == 30


def test_held_out_rows_come_from_their_own_files_or_from_those_of_training(tmp_path: Path) -> None:
    a, b = rows(tmp_path / "a.jsonl", 6), rows(tmp_path / "b.jsonl", 4)
    assert "b 0" in str(questions(a, split="validation", validation_files=(b,))[0].messages)
    fallen_back = questions(a, split="validation", train_rows=2, validation_rows=5)
    assert truths(fallen_back) == ["0", "1", "2", "3", "4"]


def test_validation_rows_are_batched(tmp_path: Path) -> None:
    a = rows(tmp_path / "a.jsonl", 7)
    assert questions(a, split="validation").batches() == [[0, 1, 2, 3, 4, 5, 6]]
    assert questions(a, split="validation", validation_batch=3).batches() == [[0, 1, 2], [3, 4, 5], [6]]
    shuffled = questions(a, split="validation", validation_batch=3, validation_shuffle=True)
    first, second = (list(chain(*shuffled.batches(passed))) for passed in range(2))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert first == list(chain(*shuffled.batches(0)))


def test_the_order_of_training_follows_the_configuration(tmp_path: Path) -> None:
    a, b = rows(tmp_path / "a.jsonl", 6), rows(tmp_path / "b.jsonl", 4)
    assert questions(a, b, shuffle=False).create_sampler().take(10) == list(range(10))
    assert sorted(questions(a, b).create_sampler().take(10)) == list(range(10))
    weighted = questions(a, b, weights=(1.0, 3.0)).create_sampler().take(100)
    assert 10 < sum(row < 6 for row in weighted) < 45


def tagged(path: Path, *tags: str | None) -> str:
    lines = ({"prompt": f"{n}", "answer": str(n), "tag": tag} for n, tag in enumerate(tags))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


DOMAINS = {"sums": {"sources": ["add*", "plus"], "share": 0.4}, "rest": {"sources": ["*"], "share": 0.6}}


def test_a_step_has_the_shares_of_the_domains(tmp_path: Path) -> None:
    file = tagged(tmp_path / "a.jsonl", "addition", "plus", "code", "words", None, "adds", "code", "code")
    actual = questions(file, domains=DOMAINS, source_key="tag")
    assert [question.data_source for question in actual] == ["sums"] * 2 + ["rest"] * 3 + ["sums"] + ["rest"] * 2
    sampler = actual.create_sampler(4)
    for _ in range(6):
        sources = [actual[row].data_source for row in sampler.take(4)]
        assert (sources.count("sums"), sources.count("rest")) == (1, 3)  # int(0.4 * 4) = 1, and the rest


def test_rows_of_no_domain_are_not_trained_on_and_not_held_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tagged(tmp_path / "a.jsonl", "addition", "code", "plus")
    actual = questions(file, domains={"sums": {**DOMAINS["sums"], "share": 1.0}}, source_key="tag")
    with caplog.at_level("INFO"):
        sampler = actual.create_sampler(2)
    assert "1 rows of data.train_files belong to no domain" in caplog.text
    assert {row for _ in range(4) for row in sampler.take(2)} == {0, 2}
    with pytest.raises(ConfigError, match=r"a.jsonl, row 1: a held-out row belongs to no domain"):
        actual.check_domains(10)
    with pytest.raises(ConfigError, match=r"data\.domains\.sums has 2 rows in data\.train_files, fewer than the 3"):
        actual.create_sampler(3)


def test_a_column_can_name_the_domain_of_a_row(tmp_path: Path) -> None:
    lines = ({"prompt": "1", "answer": "1", "tag": "plus", "domain": name} for name in ("rest", None, "other"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    actual = questions(str(tmp_path / "a.jsonl"), domains=DOMAINS, source_key="tag")
    assert [question.data_source for question in actual] == ["rest", "sums", ""]


def test_keep_options_add_prompts_to_the_extra_fields(tmp_path: Path) -> None:
    a = rows(tmp_path / "a.jsonl", 3)
    actual = questions(a, keep_raw_tokens=True, keep_messages=True, keep_text=True)
    extra = actual[1].extra
    assert extra["raw_prompt_ids"] == list(actual.prompt(1))
    assert extra["raw_prompt"] == [{"role": "user", "content": "a 1"}]
    assert extra["full_prompts"] == "<|im_start|>user\na 1<|im_end|>\n<|im_start|>assistant\n"
    assert extra["answer"] == "1"
    assert set(questions(a)[1].extra) == {"answer"}


OWN = """
class Own:
    def __init__(self, data_files, tokenizer, config):
        self.files, self.key = data_files, config.prompt_key
        assert tokenizer.eos_token

    def __len__(self):
        return 3

    def __getitem__(self, number):
        return {self.key: f"{self.files[0]} {number}"} if number < 2 else [number]

class NoRows:
    def __init__(self, *given):
        pass
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


def test_a_custom_dataset_class_provides_the_rows(own: str) -> None:
    actual = questions("anything", dataset_class=f"{own}:Own", prompt_key="q")
    assert len(actual) == 3
    assert actual[1].messages == ({"role": "user", "content": "anything 1"},)
    with pytest.raises(ConfigError, match="row 2 is a list"):
        actual[2]
    with pytest.raises(ConfigError, match="does not define __len__ and __getitem__"):
        questions("anything", dataset_class=f"{own}:NoRows")
    with pytest.raises(ConfigError, match=r"did you mean \S*:Own\?"):
        questions("anything", dataset_class=f"{own}:Owm")
    with pytest.raises(ConfigError) as caught:
        questions("anything", dataset_class=f"{own}:Own", weights=(1.0,))
    assert caught.value.key == "data.weights"


def test_empty_train_files_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"data.train_files is empty"):
        questions()
