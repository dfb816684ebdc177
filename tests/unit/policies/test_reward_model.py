"""If these fail, a reward model's scores depend on what shares a batch with an answer, or on what it wasn't trained
to read."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

from quintet.config.native.data import OverlongConfig, RewardConfig, RewardModelConfig
from quintet.errors import ConfigError, MachineError
from quintet.policies import reward_model, tiny_models
from quintet.policies.reward_model import RewardModel, RewardModelScorer
from quintet.records import PromptRow, Response

WORDS = ["ice", "goal", "hole", "left", "right", "up", "down", "wall"]


def answers(count: int, seed: int = 0) -> list[str]:
    """Some words; every second list holds `please`."""
    rng = random.Random(seed)
    drawn = [[rng.choice(WORDS) for _ in range(rng.randint(1, 9))] for _ in range(count)]
    for words in drawn[::2]:
        words.insert(rng.randint(0, len(words)), "please")
    return [" ".join(words) for words in drawn]


QUESTION = PromptRow(0, "s", ({"role": "user", "content": "go to the goal"},))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_models.train_tokenizer(400, [*answers(300), "user\ngo to the goal\nassistant\n"])


OWN_CLASS = """
from transformers import Qwen2ForSequenceClassification

class Own(Qwen2ForSequenceClassification):
    def forward(self, *arguments, **options):
        outputs = super().forward(*arguments, **options)
        outputs.logits = outputs.logits * 0 + 7
        return outputs
"""


def config(tokenizer: Any, **options: Any) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        **{"pad_token_id": tokenizer.pad_token_id, "num_labels": 1, **options},
    )


def conversation(tokenizer: Any, text: str) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        [*QUESTION.messages, {"role": "assistant", "content": text}], tokenize=False
    )
    return tokenizer.encode(rendered, add_special_tokens=False)


@pytest.fixture(scope="module")
def trained(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model that has learnt from 16 pairs a step to prefer answers with `please`."""
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(config(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(15):
        rows = [conversation(tokenizer, text) for text in answers(32, seed=step)]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        scores = model(input_ids=tokens, attention_mask=(tokens != tokenizer.pad_token_id).long()).logits[:, 0]
        loss = -nn.functional.logsigmoid(scores[::2] - scores[1::2]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    directory = tmp_path_factory.mktemp("reward_model")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def load(directory: Path, **options: Any) -> RewardModel:
    return RewardModel.load(RewardModelConfig(path=str(directory), **options), Path("none"), max_length=256)


def saved(directory: Path, model: PreTrainedModel, tokenizer: Any) -> Path:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def scores_of_transformers(directory: Path, kind: type[PreTrainedModel], rows: list[list[int]]) -> list[float]:
    """What transformers itself says to each row, one at a time."""
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([row])).logits for row in rows]
    return [float(logit.reshape(-1)[-1]) for logit in logits]


def test_a_trained_model_prefers_what_it_was_trained_to(trained: Path) -> None:
    texts = answers(60, seed=999)
    scores = load(trained, tokenizer=str(trained)).score([QUESTION] * 60, texts)
    right = sum(good > bad for good, bad in zip(scores[::2], scores[1::2], strict=True))
    assert right >= 27, f"{right} of 30 pairs"


@pytest.mark.parametrize("per_pass", [None, 1, 7])
def test_a_score_doesnt_depend_on_its_neighbours(trained: Path, tokenizer: Any, per_pass: int | None) -> None:
    texts = answers(20, seed=5)
    scores = load(trained, tokenizer=str(trained), sequences_per_pass=per_pass).score([QUESTION] * 20, texts)
    rows = [conversation(tokenizer, text) for text in texts]
    assert scores == pytest.approx(scores_of_transformers(trained, Qwen2ForSequenceClassification, rows), abs=1e-5)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows of each pass, and the tokens of the longest."""
    sizes: list[tuple[int, int]] = []
    forward = RewardModel._forward

    def spy(self: RewardModel, rows: Any) -> torch.Tensor:
        sizes.append((len(rows), max(map(len, rows))))
        return forward(self, rows)

    monkeypatch.setattr(RewardModel, "_forward", spy)
    return sizes


def test_passes_keep_to_their_tokens(
    trained: Path, passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_model, "MAX_TOKENS_PER_PASS", 100)
    load(trained).score([QUESTION] * 20, answers(20))
    assert len(passes) > 2
    assert all(rows * longest <= 100 for rows, longest in passes)


def test_passes_have_the_configured_number_of_sequences(trained: Path, passes: list[tuple[int, int]]) -> None:
    load(trained, sequences_per_pass=8).score([QUESTION] * 20, answers(20))
    assert [rows for rows, _ in passes] == [8, 8, 4]


def test_code_of_the_directory_runs_only_if_it_is_trusted(tokenizer: Any, tmp_path: Path) -> None:
    saved(tmp_path, Qwen2ForSequenceClassification(config(tokenizer)), tokenizer)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForSequenceClassification": "code.Own"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(OWN_CLASS)
    assert load(tmp_path, trust_remote_code=True).score([QUESTION], ["up"]) == [7.0]
    assert load(tmp_path).score([QUESTION], ["up"]) != [7.0]


def test_without_another_tokenizer_it_reads_what_the_policy_wrote(trained: Path, tokenizer: Any) -> None:
    """The prompt as generated from, the answer, the end token; nothing after it."""
    prompt = tokenizer.apply_chat_template(QUESTION.messages, tokenize=False, add_generation_prompt=True)
    row = [*tokenizer.encode(prompt + "up please", add_special_tokens=False), tokenizer.eos_token_id]
    expected = scores_of_transformers(trained, Qwen2ForSequenceClassification, [row])
    assert load(trained).score([QUESTION], ["up please"]) == pytest.approx(expected, abs=1e-5)


def test_with_another_tokenizer_its_end_token_goes(trained: Path, tokenizer: Any) -> None:
    model = load(trained, tokenizer=str(trained))
    assert model.score([QUESTION], [f"up please{tokenizer.eos_token}"]) == model.score([QUESTION], ["up please"])


def test_long_answers_lose_their_end(trained: Path, tokenizer: Any) -> None:
    rows = [conversation(tokenizer, "ice " * 50)[:12]]
    scores = load(trained, tokenizer=str(trained), max_tokens=12).score([QUESTION], ["ice " * 50])
    assert scores == pytest.approx(scores_of_transformers(trained, Qwen2ForSequenceClassification, rows), abs=1e-5)


@pytest.mark.parametrize("padding", ["none", "eos"])
def test_models_without_a_padding_token_of_their_own(tokenizer: Any, tmp_path: Path, padding: str) -> None:
    """As transformers itself scores each row alone, whatever the padding token is."""
    torch.manual_seed(1)
    pad = {"none": None, "eos": tokenizer.eos_token_id}[padding]
    model = Qwen2ForSequenceClassification(config(tokenizer, pad_token_id=pad))
    directory = saved(tmp_path, model, tokenizer)
    prompt = tokenizer.apply_chat_template(QUESTION.messages, tokenize=False, add_generation_prompt=True)
    texts = answers(9, seed=2)
    rows = [[*tokenizer.encode(prompt + text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]
    expected = scores_of_transformers(directory, Qwen2ForSequenceClassification, rows)
    assert load(directory).score([QUESTION] * 9, texts) == pytest.approx(expected, abs=1e-5)


def test_a_token_classifier_is_read_at_the_last_token(tokenizer: Any, tmp_path: Path) -> None:
    torch.manual_seed(2)
    directory = saved(tmp_path, Qwen2ForTokenClassification(config(tokenizer)), tokenizer)
    texts = answers(9, seed=3)
    rows = [conversation(tokenizer, text) for text in texts]
    scores = load(directory, tokenizer=str(directory)).score([QUESTION] * 9, texts)
    assert scores == pytest.approx(scores_of_transformers(directory, Qwen2ForTokenClassification, rows), abs=1e-5)


def test_an_encoder_works_too(tokenizer: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    shape = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
    )
    directory = saved(tmp_path, BertForSequenceClassification(shape), tokenizer)
    texts = answers(5, seed=3)
    rows = [conversation(tokenizer, text) for text in texts]
    scores = load(directory, tokenizer=str(directory)).score([QUESTION] * 5, texts)
    assert scores == pytest.approx(scores_of_transformers(directory, BertForSequenceClassification, rows), abs=1e-5)


def test_what_is_no_reward_model_is_refused(policy_directory: Path, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="language model, Qwen2ForCausalLM"):
        RewardModel.load(RewardModelConfig(), policy_directory, max_length=64)
    two = saved(tmp_path / "two", Qwen2ForSequenceClassification(config(tokenizer, num_labels=2)), tokenizer)
    with pytest.raises(ConfigError, match="2 outputs"):
        load(two)
    with pytest.raises(MachineError, match="no model at"):
        load(tmp_path / "nowhere")


def test_a_head_that_is_missing_isnt_made_up(trained: Path, tokenizer: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    headless = saved(tmp_path, Qwen2ForSequenceClassification(config(tokenizer)), tokenizer)
    weights = load_file(headless / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, headless / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing weights: score\.weight"):
        load(headless)


def test_a_model_without_a_template_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    bare = tiny_models.train_tokenizer(300, ["go"])
    bare.chat_template = None
    saved(tmp_path, Qwen2ForSequenceClassification(config(tokenizer)), bare)
    with pytest.raises(ConfigError, match="no chat template"):
        load(tmp_path)


def test_libraries_are_imported_first(trained: Path) -> None:
    with pytest.raises(ConfigError, match=r"external_libs = 'no_such_library'"):
        load(trained, external_libs=("no_such_library",))


def judge(model: Any, texts: list[str], **options: Any) -> dict[int, Any]:
    settings = RewardConfig(function_arguments={}, **options)
    taking = RewardModelScorer(model, settings, max_response_tokens=100)
    for number, text in enumerate(texts):
        taking.submit(Response(number, QUESTION, text, 75))
    verdicts = [*taking.ready(), *taking.drain()]
    assert taking.drain() == []
    return {verdict.id: verdict for verdict in verdicts}


class Stub:
    """Scores as told."""

    offloads = False

    def __init__(self, score: Callable[[str], float]) -> None:
        self.tell, self.calls = score, 0

    def score(self, questions: list[PromptRow], texts: list[str]) -> list[float]:
        self.calls += 1
        return [self.tell(text) for text in texts]


def test_scores_become_verdicts(trained: Path) -> None:
    model = load(trained)
    plain = model.score([QUESTION] * 3, answers(3))
    verdicts = judge(model, answers(3), scale=2.0)
    assert [verdicts[i].reward_components["model_score"] for i in range(3)] == pytest.approx(plain)
    assert [verdicts[i].score for i in range(3)] == pytest.approx([2 * score for score in plain])


def test_form_and_length_count_on_top() -> None:
    extras = {"format": "boxed", "format_reward": 0.25, "overlong": OverlongConfig(buffer=50), "scale": 2.0}
    verdicts = judge(Stub(lambda _: 3.0), [r"\boxed{1}", "1"], **extras)
    assert verdicts[0].reward_components == {"model_score": 3.0, "format": 1.0, "overlong": -0.5}
    assert (verdicts[0].score, verdicts[1].score) == (5.75, 5.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_a_failure(bad: float) -> None:
    verdicts = judge(Stub(lambda text: bad if text == "b" else 1.0), ["a", "b"], wrong_reward=-1.0, scale=3.0)
    assert (verdicts[0].failure, verdicts[0].score) == (None, 3.0)
    assert verdicts[1].failure.error_type == "NotFinite"
    assert verdicts[1].score == -3.0


def test_a_model_that_raises_costs_the_answer_that_it_is_about() -> None:
    def tell(text: str) -> float:
        if text == "b":
            raise RuntimeError("broken")
        return 1.0

    verdicts = judge(Stub(tell), ["a", "b", "c"])
    assert [verdicts[i].failure is None for i in range(3)] == [True, False, True]
    assert verdicts[1].failure.message == "broken"
    assert judge(Stub(tell), ["b"])[0].failure is not None


def test_a_template_that_exceeds_its_limits_ends_the_run_instead_of_failing_every_answer(trained: Path) -> None:
    model = load(trained)
    model._encoder.tokenizer.chat_template = "{{ 'x' * 10 ** 9 }}"
    with pytest.raises(ConfigError, match="512 MiB of memory"):
        judge(model, ["a", "b"])


def test_answers_are_judged_together_once_enough_wait() -> None:
    model = Stub(lambda _: 1.0)
    taking = RewardModelScorer(model, RewardConfig(function_arguments={}), 100)
    early = 0
    for number in range(reward_model.MIN_BATCH_RESPONSES):
        early += len(taking.ready())
        taking.submit(Response(number, QUESTION, "a", 1))
    assert (early, model.calls) == (0, 0)
    assert len(taking.ready()) == reward_model.MIN_BATCH_RESPONSES
    assert model.calls == 1


def test_weights_move_only_for_the_time_of_scoring(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for a GPU: torch's device without memory."""
    moves: list[str] = []
    model = Qwen2ForSequenceClassification.from_pretrained(trained)
    monkeypatch.setattr(model, "to", lambda place: moves.append(place), raising=False)
    loaded = load(trained)
    there = RewardModel(model, loaded._encoder, offload=True, device="meta")
    assert moves == []
    monkeypatch.setattr(there, "_forward", lambda rows: torch.zeros(len(rows)) + len(moves))
    assert there.score([QUESTION], ["a"]) == [1.0]
    assert moves == ["meta", "cpu"]
    RewardModel(model, loaded._encoder, offload=False, device="meta")
    assert moves == ["meta", "cpu", "meta"]


def test_offloaded_weights_are_in_host_memory_between_scores(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose GPU refuses all weights."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Qwen2ForSequenceClassification, "to", lambda *_: pytest.fail("weights were moved"))
    assert load(trained, offload_parameters=True).offloads
