"""If these fail, responses belong to other prompts, depend on interruptions, or are not those that verl would write."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.data.prompt_split import PromptSplit
from quintet.errors import ConfigError, InterruptedRun, MachineError
from quintet.pipelines import generate as pipeline
from quintet.pipelines.generate import _Engines, _Stopped, generate
from quintet.pipelines.response_store import ResponseBatch, ResponseStore
from quintet.policies.model_loading import load_tokenizer
from quintet.records import Failure, FinishReason, Generation, Request
from quintet.rollout.sampling_params import SamplingParams
from quintet.runtime.signals import StopRequest
from quintet.seeds import derive_seed

ROWS = [
    {"prompt": [{"role": "user", "content": f"user {n} to {n + 1}"}], "data_source": "sums", "number": n}
    for n in range(7)
]
COMMON = (
    *("env.name=prompts", "rollout.max_prompt_tokens=64", "rollout.max_response_tokens=6"),
    *("generation.samples=2", "generation.batch_size=3"),
)


@pytest.fixture(autouse=True)
def _rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def run_of(policy: Path, *words: str, name: str = "a") -> ComposedConfig:
    own = (f"policy.path={policy}", "data.train_files=[rows.jsonl]", f"name={name}")
    return load_experiment(None, (*own, f"generation.output_path={name}.jsonl", *COMMON, *words))


def generated(policy: Path, *words: str, name: str = "a") -> list[dict[str, Any]]:
    """The rows that a whole run writes."""
    composed = run_of(policy, *words, name=name)
    generate(composed, Console(file=io.StringIO()))
    assert composed.experiment.generation is not None
    return [json.loads(line) for line in Path(composed.experiment.generation.output_path).read_text().splitlines()]


class Scripted:
    """An engine group whose response to request n has n + 1 tokens, the last ones first; it may fail or refuse some."""

    def __init__(self, reasons: dict[int, FinishReason] | None = None, refused: Collection[int] = ()) -> None:
        self.requests: list[Request] = []
        self.aborted: list[int] = []
        self.resets = 0
        self._reasons, self._refused = reasons or {}, refused
        self._waiting: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def add_request(self, request: Request) -> None:
        if request.id in self._refused:
            raise ValueError("no room")
        self.requests.append(request)
        self._waiting.append(request)

    def step(self) -> list[Generation]:
        request = self._waiting.pop()
        reason = self._reasons.get(request.id, FinishReason.STOP)
        failure = Failure("engine", "Broken", "no memory") if reason is FinishReason.FAILED else None
        tokens = tuple(range(request.id + 1))
        return [Generation(request.id, tokens, (0.0,) * len(tokens), reason, 0, failure=failure)]

    def abort(self, ids: Collection[int]) -> list[Generation]:
        self.aborted += ids
        self._waiting.clear()
        return []

    def reset_prefix_cache(self) -> None:
        self.resets += 1


class Numbers:
    """A tokenizer that writes tokens as numbers; 0 is special."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(str(token) for token in tokens if token or not skip_special_tokens)


class Prompts:
    """Prompts of one token, the number of the row."""

    def prompt(self, row: int) -> tuple[int, ...]:
        return (row,)

    def images(self, row: int) -> tuple[Any, ...]:
        return ()


SAMPLING = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=5)


def engines_of(group: Scripted) -> _Engines:
    return _Engines(group, Numbers(), Prompts(), SAMPLING, (9,), 6)  # type: ignore[arg-type]


def responded(group: Scripted, stop: StopRequest | None = None) -> ResponseBatch:
    """Three responses each to the prompts 4 and 5."""
    return engines_of(group).respond([4, 5], 3, lambda: None, stop or StopRequest())


def test_responses_are_listed_by_prompt_and_sample_without_special_tokens() -> None:
    """Requests 0 to 2 are of prompt 4, 3 to 5 of prompt 5; request n has the tokens 0 … n, 21 in all."""
    group = Scripted({1: FinishReason.LENGTH, 5: FinishReason.LENGTH})
    batch = responded(group)
    assert batch.responses == [["", "1", "1 2"], ["1 2 3", "1 2 3 4", "1 2 3 4 5"]]
    assert (batch.tokens, batch.num_cut_off, batch.num_empty) == (21, 2, 0)
    assert group.resets == 1


def test_requests_have_the_sampling_of_the_run_and_a_seed_of_their_own() -> None:
    group = Scripted()
    responded(group)
    assert [request.prompt for request in group.requests] == [(4,)] * 3 + [(5,)] * 3
    assert [each.seed for each in group.requests] == [
        derive_seed(5, row, sample, 0) for row in (4, 5) for sample in range(3)
    ]
    for each in group.requests:
        assert (each.temperature, each.top_k, each.top_p, each.max_tokens) == (0.7, 20, 0.9, 6)
        assert each.stop_token_ids == (9,)


def test_a_prompt_without_room_has_empty_responses() -> None:
    batch = responded(Scripted(refused={3, 4, 5}))
    assert (batch.responses[1], batch.num_empty) == (["", "", ""], 3)


def test_a_failed_response_ends_the_run_and_is_not_stored_as_an_answer() -> None:
    with pytest.raises(MachineError, match="prompt 5 could not be generated: Broken: no memory"):
        responded(Scripted({4: FinishReason.FAILED}))


def test_a_signal_aborts_the_responses_of_the_batch() -> None:
    group = Scripted()
    with pytest.raises(_Stopped):
        responded(group, StopRequest(signal.SIGTERM))
    assert sorted(group.aborted) == [0, 1, 2, 3, 4]


def test_rows_and_responses_are_written_in_the_order_of_the_file(policy_directory: Path) -> None:
    rows = generated(policy_directory)
    assert [{key: row[key] for key in ROWS[0]} for row in rows] == ROWS
    assert all(len(row["responses"]) == 2 for row in rows)
    assert len({text for row in rows for text in row["responses"]}) > 7
    state = json.loads(Path("runs/a/run.json").read_text())
    assert state["status"] == "finished"


def test_batches_and_other_rows_do_not_change_a_response(policy_directory: Path) -> None:
    expected = generated(policy_directory)
    assert generated(policy_directory, "generation.batch_size=7", name="b") == expected
    assert generated(policy_directory, "seed=1", name="c") != expected


def test_an_interrupted_run_continues_with_the_same_responses(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of the second of three batches, of which half a line is on the disk."""
    expected, respond, calls = generated(policy_directory), _Engines.respond, []

    def dying(*arguments: Any) -> ResponseBatch:
        calls.append(arguments[1])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return respond(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(_Engines, "respond", dying)
        with pytest.raises(KeyboardInterrupt):
            generated(policy_directory, name="b")
    assert not Path("b.jsonl").exists()
    with Path("runs/b/responses.jsonl").open("a") as file:
        file.write('{"responses": [["1", "2"], ["')
    asked = []

    def watched(*arguments: Any) -> ResponseBatch:
        asked.append(list(arguments[1]))
        return respond(*arguments)

    monkeypatch.setattr(_Engines, "respond", watched)
    assert generated(policy_directory, name="b") == expected
    assert asked == [[3, 4, 5], [6]]


def test_a_finished_run_writes_its_file_again_without_engines(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = "generation.response_key=answers"
    expected = generated(policy_directory, column)
    assert all(len(row["answers"]) == 2 for row in expected)
    monkeypatch.setattr(pipeline, "build_engines", None)
    assert generated(policy_directory, "generation.output_path=other.jsonl", column) == expected


def test_a_signal_is_an_interruption_that_says_how_to_continue(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> ResponseBatch:
        raise _Stopped(StopRequest(signal.SIGTERM))

    monkeypatch.setattr(_Engines, "respond", stopped)
    with pytest.raises(InterruptedRun, match=r"SIGTERM: 0 of 7 prompts .*\n  rerun the same command") as error:
        generated(policy_directory)
    assert error.value.exit_status == 128 + signal.SIGTERM


@pytest.mark.parametrize("word", ["seed=1", "rollout.top_k=3", "generation.samples=3"])
def test_responses_of_other_settings_are_not_continued(policy_directory: Path, word: str) -> None:
    generated(policy_directory)
    with pytest.raises(ConfigError, match=f"{word.partition('=')[0]} = .* were generated with"):
        generated(policy_directory, word)
    assert len(generated(policy_directory, word, "resume=never")) == 7


def test_responses_to_a_file_that_has_changed_are_not_continued(policy_directory: Path, tmp_path: Path) -> None:
    generated(policy_directory)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(ConfigError, match="a file has changed"):
        generated(policy_directory)


def test_a_long_prompt_is_refused_before_anything_is_generated(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "build_engines", None)
    with pytest.raises(ConfigError, match=r"data\.truncation"):
        generated(policy_directory, "rollout.max_prompt_tokens=4")


def test_a_long_prompt_loses_its_end_as_under_verl(policy_directory: Path) -> None:
    """`tokenizer.apply_chat_template(…, truncation=True, max_length=…)` keeps the first tokens."""
    config = run_of(policy_directory, "rollout.max_prompt_tokens=5", "data.truncation=right").experiment
    assert config.data is not None
    prompts = pipeline._open_prompts(config, config.data)
    messages: Any = ROWS[3]["prompt"]
    whole = load_tokenizer(policy_directory).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert len(whole) > 5
    assert list(prompts.prompt(3)) == whole[:5]


def test_rows_that_are_left_out_are_not_written(policy_directory: Path) -> None:
    rows = generated(policy_directory, "data.train_rows=4")
    assert len(rows) == 4
    assert [row["number"] for row in rows] == sorted(row["number"] for row in rows)


def test_greedy_responses_do_not_depend_on_the_seed(policy_directory: Path) -> None:
    words = ("rollout.do_sample=false", "generation.samples=1")
    assert generated(policy_directory, *words) == generated(policy_directory, *words, "seed=9", name="b")


def test_the_store_counts_prompts_and_keeps_batches(tmp_path: Path) -> None:
    batches = [ResponseBatch([["a"], ["b"]], 5, 1), ResponseBatch([["c"]], 2, 0, 1)]
    store = ResponseStore(tmp_path / "store.jsonl", {"seed": 1})
    for batch in batches:
        store.append(batch)
    store.close()
    again = ResponseStore(tmp_path / "store.jsonl", {"seed": 1})
    assert (again.num_prompts, list(again.batches())) == (3, batches)
    again.close()
    assert ResponseStore(tmp_path / "store.jsonl", {"seed": 1}, restart=True).num_prompts == 0


def test_a_store_whose_settings_were_not_written_completely_starts_again(tmp_path: Path) -> None:
    (tmp_path / "store.jsonl").write_text('{"seed": ')
    assert ResponseStore(tmp_path / "store.jsonl", {"seed": 1}).num_prompts == 0


def test_source_rows_have_all_columns(policy_directory: Path) -> None:
    config = run_of(policy_directory).experiment
    assert config.data is not None
    prompts: PromptSplit = pipeline._open_prompts(config, config.data)
    assert prompts.source_row(2) == ROWS[2]
