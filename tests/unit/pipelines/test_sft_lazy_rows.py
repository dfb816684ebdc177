"""If these fail, fine-tuning on many rows encodes all of them before its first step, or learns from other rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quintet.data.conversations import TokenizedConversations, TokenSequence
from quintet.data.lazy_conversations import LazyConversations
from quintet.errors import ConfigError
from quintet.pipelines.sft import rows as sft_rows

Run = Callable[..., Path]
COMMON = (
    "sft.batch=8",
    "sft.epochs=2",
    "sft.optimizer.learning_rate=0.01",
    "tracking.loggers=[jsonl]",
    "training.threads=1",
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Encode every split when it is needed, as splits of many rows; gives the cache."""
    monkeypatch.setattr(sft_rows, "MAX_EAGER_ROWS", 0)
    monkeypatch.setattr(sft_rows, "cache_directory", lambda _: tmp_path / "cache")
    return tmp_path / "cache"


def test_rows_that_workers_encode_ahead_train_the_same_weights(tune: Run) -> None:
    lazy, eager = tune(name="lazy"), tune("data.check=all", name="eager")
    weights = [load_file(run / "model" / "model.safetensors") for run in (lazy, eager)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_row_that_cannot_be_rendered_ends_the_run_when_it_is_met_or_before(tune: Run, tmp_path: Path) -> None:
    """The last of 24 rows, in order, with more tokens than fit; the third step needs it."""
    talks = [{"prompt": "1" if n < 23 else "1" * 3000, "response": "2"} for n in range(24)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, talks)))
    overrides = ("data.shuffle=false", "sft.max_tokens=100", "sft.epochs=1")
    for check, steps in (("columns", [0, 1, 2]), ("all", [])):
        with pytest.raises(ConfigError, match=r"train\.jsonl, row 23 has .* tokens"):
            tune(*overrides, f"data.check={check}", name=check)
        file = tmp_path / check / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        assert [json.loads(line)["step"] for line in lines] == steps


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1"}, "row 19 has no response"),
        ({"messages": [{"role": "user", "content": "1"}, {"role": "robot", "content": 5}]}, "row 19 message 1"),
        ({"messages": [{"from": "alien", "value": "1"}]}, "unknown sender 'alien'"),
        ({"messages": 7}, "row 19 contains int"),
        (
            {"messages": [{"role": "robot", "content": "1"}, {"role": "assistant", "content": "2"}]},
            "unknown role 'robot'",
        ),
    ],
)
def test_columns_types_and_senders_are_checked_before_the_first_step(
    tune: Run, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    talks: list[dict[str, Any]] = [{"prompt": "1", "response": "2"}] * 19
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, [*talks, row])))
    with pytest.raises(ConfigError, match=message):
        tune()
    assert not (tmp_path / "a" / "metrics.jsonl").exists()


class Worker:
    """Encodes requests in order, in this process."""

    def __init__(self) -> None:
        self.requests: list[list[int]] = []
        self.taken = 0

    def submit(self, request: dict[str, Any]) -> None:
        self.requests.append(request["rows"])

    def result(self) -> Any:
        self.taken += 1
        return [[([number, number + 1], [0, 1])] for number in self.requests[self.taken - 1]]

    def close(self) -> None:
        pass


def test_each_row_is_encoded_once_by_a_worker_or_here() -> None:
    worker, here = Worker(), list[int]()

    def encode(number: int) -> list[TokenSequence]:
        here.append(number)
        return [TokenSequence((number, number + 1), (False, number != 14))]

    notes: list[str] = []
    rows = LazyConversations([10, 11, 12, 13, 14], encode, lambda: worker, notes.append)
    rows.prepare([2, 3])
    rows.prepare([3, 2])
    batch = rows.batch([0, 3])
    assert (here, worker.requests, worker.taken) == ([10], [[12, 13]], 1)
    assert batch.tokens.tolist() == [10, 11, 13, 14]
    assert batch.group.tolist() == [0, 3]
    expected = TokenizedConversations(
        [[TokenSequence((10, 11), (False, True))], [TokenSequence((13, 14), (False, True))]]
    )
    assert batch.loss_mask.tolist() == expected.batch([0, 1]).loss_mask.tolist()
    rows.batch([0, 2])
    assert (here, worker.taken) == ([10], 1)
    assert rows.batch([4, 1]).group.tolist() == [1], "row 4 has no trained token"
    assert len(notes) == 1
    with pytest.raises(ConfigError, match="no row of a step"):
        rows.batch([4])


@pytest.mark.parametrize("check", ["columns", "all"])
def test_a_run_that_is_started_again_encodes_nothing(tune: Run, monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    first = tune(f"data.check={check}", name="first")

    def refuse(*_: object) -> None:
        raise AssertionError("a row is encoded or checked again")

    monkeypatch.setattr(sft_rows, "WorkerPool", refuse)
    monkeypatch.setattr(sft_rows.RowEncoder, "__call__", refuse)
    monkeypatch.setattr(sft_rows.RowEncoder, "check_columns", refuse)
    again = tune(f"data.check={check}", name="again")
    weights = [load_file(run / "model" / "model.safetensors") for run in (first, again)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_settings_that_change_tokens_have_other_cached_rows(tune: Run, cache: Path) -> None:
    changes = ("sft.max_tokens=64", "data.template=chatml", "sft.train_on_prompt=true", "data.system_prompt=Hello")
    fingerprints: set[str] = set()
    for number, words in enumerate([(), *((change,) for change in changes)]):
        tune("sft.epochs=1", "data.max_steps=1", *words, name=str(number))
        fingerprints |= {file.name.partition("-")[0] for file in (cache / "encoded").iterdir()}
        assert len(fingerprints) == 2 * (number + 1), "those of both splits"
    tune("data.seed=3", "sft.batch=4", "sft.epochs=1", "data.max_steps=1", name="order")
    assert {file.name.partition("-")[0] for file in (cache / "encoded").iterdir()} == fingerprints
