"""If these fail, structured outputs are not what the caller's parser expects, or they change other requests."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from test_hf_engine import agrees, request, run

from quintet.policies.model_loading import load_model, load_tokenizer
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines import grammars
from quintet.rollout.engines.grammars import MAX_SPEC_LENGTH, GrammarCompiler, GrammarMemoryError
from quintet.rollout.engines.hf.engine import HfEngine
from quintet.sampling import StructuredOutput

each_backend = pytest.mark.usefixtures("_with_and_without_kernels")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"child": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["child"],
            "additionalProperties": False,
        }
    },
}
PATTERN = {"type": "array", "items": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"}, "minItems": 2, "maxItems": 2}


def is_person(value: Any) -> bool:
    name, age, tags = value["name"], value["age"], value["tags"]
    valid = len(value) == 3 and len(name) <= 5 and isinstance(age, int) and 0 <= age <= 120
    return valid and 1 <= len(tags) <= 2 and set(tags) <= {"a", "é"}


def is_tree(value: Any) -> bool:
    return value is None or (value.keys() == {"child"} and is_tree(value["child"]))


def is_pattern_list(value: Any) -> bool:
    return len(value) == 2 and all(re.fullmatch("[A-Z]{2}[0-9]", text) for text in value)


@pytest.fixture
def tokenizer(policy_directory: Path) -> Any:
    return load_tokenizer(policy_directory)


@pytest.fixture
def engine(policy_directory: Path, tokenizer: Any) -> HfEngine:
    grammars = GrammarCompiler(tokenizer, len(tokenizer))
    return HfEngine(load_model(policy_directory), max_num_seqs=4, max_model_len=400, grammars=grammars)


def structured(number: int, tokenizer: Any, kind: Any, spec: object = "", **changes: object) -> Request:
    spec = spec if isinstance(spec, str) else json.dumps(spec)
    fields = {"max_tokens": 300, "stop_token_ids": (tokenizer.eos_token_id,)} | changes
    return request(number, structured_output=StructuredOutput(kind, spec), **fields)


def text_of(generation: Generation, tokenizer: Any) -> str:
    """The text of a response that ended by a stop token, which is only its last token."""
    assert generation.finish_reason is FinishReason.STOP
    *tokens, last = generation.tokens
    assert last == tokenizer.eos_token_id
    assert last not in tokens
    return str(tokenizer.decode(tokens))


def tokens_by_id(done: dict[int, Generation]) -> dict[int, tuple[int, ...]]:
    return {number: generation.tokens for number, generation in done.items()}


@each_backend
@pytest.mark.parametrize(
    ("schema", "conforms"),
    [
        (PERSON, is_person),
        (TREE, is_tree),
        (PATTERN, is_pattern_list),
        ({"type": "object"}, lambda one: one is not None),
    ],
)
def test_finished_responses_conform_to_the_schema(
    engine: HfEngine, tokenizer: Any, policy_directory: Path, schema: Any, conforms: Callable[[Any], bool]
) -> None:
    """Ten seeds, with different sampling parameters, through four slots."""
    drawn: list[dict[str, Any]] = [{}, {"temperature": 2.0}, {"top_p": 0.9}, {"top_k": 3}, {"repetition_penalty": 1.3}]
    asked = [structured(n, tokenizer, "json_schema", schema, **drawn[n % 5]) for n in range(10)]
    done = run(engine, asked)
    finished = [each for each in done.values() if each.finish_reason is FinishReason.STOP]
    assert len(finished) > 2
    assert all(conforms(json.loads(text_of(each, tokenizer))) for each in finished)
    assert {each.finish_reason for each in done.values()} <= {FinishReason.STOP, FinishReason.LENGTH}
    for one in asked:
        if one.temperature == 1.0:
            agrees(policy_directory, one, done[one.id])


def test_white_space_between_parts_of_json_is_limited(engine: HfEngine, tokenizer: Any) -> None:
    """A model that prefers line breaks, as small ones do, writes 32 before each part of JSON, then goes on."""
    (line_break,) = tokenizer.encode("\n", add_special_tokens=False)
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    biased = [structured(n, tokenizer, "json_schema", schema, logit_bias=((line_break, 100.0),)) for n in range(2)]
    for generation in run(engine, biased).values():
        assert text_of(generation, tokenizer) == '{?"a"?:?1?}'.replace("?", "\n" * 32)


def test_white_space_in_texts_of_json_is_not_limited(engine: HfEngine, tokenizer: Any) -> None:
    (space,) = tokenizer.encode(" ", add_special_tokens=False)
    biased = structured(0, tokenizer, "json_schema", {"type": "string"}, logit_bias=((space, 100.0),), max_tokens=100)
    (generation,) = run(engine, [biased]).values()
    assert tokenizer.decode(generation.tokens) == '"' + " " * 99


def test_regex_and_choice(engine: HfEngine, tokenizer: Any) -> None:
    choices = ["Up", "Up and down", 'a "quote"\n', "é"]
    asked = [structured(n, tokenizer, "choice", choices, top_k=2) for n in range(6)]
    asked += [structured(n, tokenizer, "regex", "[a-c]{2,4}(-[0-9])?") for n in range(6, 12)]
    texts = [text_of(generation, tokenizer) for _, generation in sorted(run(engine, asked).items())]
    assert set(texts[:6]) <= set(choices)
    assert len(set(texts)) > 4
    assert all(re.fullmatch("[a-c]{2,4}(-[0-9])?", text) for text in texts[6:])


@each_backend
def test_other_requests_of_the_batch_are_unchanged(engine: HfEngine, tokenizer: Any) -> None:
    plain = [request(n, max_tokens=20, top_p=0.9 if n % 2 else 1.0) for n in range(5)]
    alone = run(engine, plain)
    neighbours = [structured(n, tokenizer, "json_schema", PERSON) for n in range(10, 14)]
    together = run(engine, [each for pair in zip(neighbours, plain, strict=False) for each in pair] + plain[4:])
    assert tokens_by_id(together) == tokens_by_id(together) | tokens_by_id(alone)


@each_backend
def test_a_response_continues_its_text_after_a_weight_sync(engine: HfEngine, tokenizer: Any) -> None:
    """Running requests are preempted and prefilled again."""
    asked = [structured(n, tokenizer, "json_schema", PERSON) for n in range(6)]
    for one in asked:
        engine.add_request(one)
    done: dict[int, Generation] = {}
    for step in range(2000):
        done |= {generation.id: generation for generation in engine.step()}
        if step % 7 == 3:
            engine.reset_prefix_cache()
        if not engine.busy:
            break
    assert tokens_by_id(done) == tokens_by_id(run(engine, asked))
    assert all(is_person(json.loads(text_of(each, tokenizer))) for each in done.values())


def test_a_response_that_is_cut_off_says_length(engine: HfEngine, tokenizer: Any) -> None:
    (generation,) = run(engine, [structured(0, tokenizer, "json_schema", PERSON, max_tokens=4)]).values()
    assert (generation.finish_reason, len(generation.tokens)) == (FinishReason.LENGTH, 4)


def test_logprobs_of_tokens_that_the_model_finds_impossible_are_finite(policy_directory: Path, tokenizer: Any) -> None:
    """At temperature 0.01 the probability of a token is 0 in float32."""
    engine = HfEngine(
        load_model(policy_directory),
        max_num_seqs=4,
        max_model_len=64,
        grammars=GrammarCompiler(tokenizer, len(tokenizer)),
    )
    (generation,) = run(engine, [structured(0, tokenizer, "choice", ["qzx"], temperature=0.01)]).values()
    assert text_of(generation, tokenizer) == "qzx"
    assert all(math.isfinite(value) for value in generation.logprobs)
    assert min(generation.logprobs) < -100


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("json_schema", "{", "json_schema: "),
        ("json_schema", '{"type": "objekt"}', "Invalid type: objekt"),
        ("json_schema", '{"if": {}}', 'Unimplemented keys: \\["if"\\]'),
        ("json_schema", '{"$ref": "https://example.com/schema"}', "https://example.com/schema"),
        ("json_schema", '{"not": ' * 20_000 + "{}" + "}" * 20_000, "maximum is 65536"),
        ("json_schema", '{"not": ' * 500 + "{}" + "}" * 500, "recursion limit"),
        ("regex", "(", "unclosed group"),
        ("regex", "[^\\s\\S]", "no text of the tokenizer's vocabulary conforms"),
    ],
)
def test_invalid_constraints_are_refused_by_name(
    engine: HfEngine, tokenizer: Any, kind: Any, spec: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add_request(structured(0, tokenizer, kind, spec))
    assert not engine.busy


def test_expensive_constraints_take_seconds_at_most(tokenizer: Any) -> None:
    compiler, before = GrammarCompiler(tokenizer, len(tokenizer)), time.monotonic()
    compiler.check(StructuredOutput("regex", "(a{1000}){1000}"))
    enum = json.dumps({"enum": [f"value {number}" for number in range(4000)]})
    assert len(enum) < MAX_SPEC_LENGTH
    compiler.check(StructuredOutput("json_schema", enum))
    assert time.monotonic() - before < 20


def test_a_constraint_that_cannot_end_is_refused() -> None:
    output = StructuredOutput("json_object")
    with pytest.raises(ValueError, match="remove min_tokens"):
        request(0, structured_output=output, stop_token_ids=(2,), min_tokens=1)
    with pytest.raises(ValueError, match="end tokens"):
        request(0, structured_output=output)


def test_vocabularies_that_cannot_express_json_are_refused_by_name() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def tokenizer(message: str, decoder: Any) -> Any:
        backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(message)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoder
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=message[-1])

    letters = GrammarCompiler(tokenizer("abc$", decoders.ByteLevel()), 4)
    with pytest.raises(ValueError, match="cannot express JSON: it has no tokens for ' !"):
        letters.check(StructuredOutput("json_object"))
    letters.check(StructuredOutput("regex", "[abc]+"))
    with pytest.raises(ValueError, match="no text of the tokenizer's vocabulary conforms"):
        letters.check(StructuredOutput("regex", "d"))
    with pytest.raises(ValueError, match="the tokenizer does not support structured outputs"):
        GrammarCompiler(tokenizer("abc$", decoders.Fuse()), 4).check(StructuredOutput("json_object"))


def test_a_text_without_continuation_fails_alone(engine: HfEngine, tokenizer: Any) -> None:
    """The stop token is also the text's only second token."""
    text = tokenizer.encode("x")[0]
    dead_end = structured(0, tokenizer, "regex", "xxy", stop_token_ids=(text,))
    done = run(engine, [dead_end, request(1)])
    assert done[0].finish_reason is FinishReason.FAILED
    assert done[0].failure is not None
    assert "no token can continue the text" in done[0].failure.message
    assert done[1].finish_reason is FinishReason.LENGTH
    assert torch.tensor(done[1].logprobs).isfinite().all()


def nested(depth: int, kind: str) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema} if kind == "items" else {kind: [schema, schema]}
    return schema


FIELDS = [{"properties": {f"p{number}": {"type": "integer"}}} for number in range(48)]
LARGE_SCHEMAS = [
    {"type": "array", "items": {"type": "integer"}, "minItems": 100_000_000},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 10**30},
    {"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 1e12}]}}},
    {"$defs": {"a": {"type": "object", "minProperties": 70_000}}, "$ref": "#/$defs/a"},
]


@pytest.mark.parametrize("schema", LARGE_SCHEMAS)
def test_a_schema_that_would_take_all_memory_is_refused_by_its_key(tokenizer: Any, schema: Any) -> None:
    with pytest.raises(ValueError, match=r"json_schema: (min|max)(Items|Length|Properties) = \S+ is more than 65536"):
        GrammarCompiler(tokenizer, len(tokenizer)).check(StructuredOutput("json_schema", json.dumps(schema)))


def test_a_property_or_constant_with_the_name_of_a_count_is_no_count(tokenizer: Any) -> None:
    schema = {"properties": {"minItems": {"const": {"maxItems": 10**9}}, "maxItems": {"enum": [10**9]}}}
    GrammarCompiler(tokenizer, len(tokenizer)).check(StructuredOutput("json_schema", json.dumps(schema)))


def test_a_grammar_that_takes_all_memory_ends_only_its_trial(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "COUNTS", frozenset())
    compiler, before = GrammarCompiler(tokenizer, len(tokenizer)), memory_mib()
    for schema in LARGE_SCHEMAS[:1]:
        with pytest.raises(ValueError, match="json_schema: compiling it takes more than"):
            compiler.check(StructuredOutput("json_schema", json.dumps(schema)))
    assert memory_mib() - before < 64
    compiler.check(StructuredOutput("json_schema", json.dumps(PERSON)))
    assert compiler.is_cached(StructuredOutput("json_schema", json.dumps(PERSON)))


def memory_mib() -> int:
    return psutil.Process().memory_info().rss >> 20


def test_the_cache_keeps_the_latest_grammars_within_its_memory(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_BYTES", 4 << 20)
    compiler = GrammarCompiler(tokenizer, len(tokenizer))
    monkeypatch.setattr(compiler._trials, "num_bytes", lambda kind, spec: 1 << 20)
    outputs = [StructuredOutput("regex", f"a{{{count}}}") for count in range(1, 7)]
    for output in outputs:
        compiler.check(output)
    assert [compiler.is_cached(output) for output in outputs] == [False, False, True, True, True, True]
    held = [compiler.check(output) for output in outputs[-4:]]
    with pytest.raises(GrammarMemoryError):
        compiler.check(outputs[0])
    assert all(compiler.is_cached(output) for output in outputs[-4:]), "an unfinished request compiles nothing twice"
    del held[0]
    compiler.check(outputs[0])
    assert not compiler.is_cached(outputs[2])


def test_the_memory_of_a_large_grammar_is_measured(tokenizer: Any) -> None:
    trials = GrammarCompiler(tokenizer, len(tokenizer))._trials
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}
    assert 4 << 20 < trials.num_bytes("json_schema", json.dumps(schema)) < 64 << 20


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("json_schema", json.dumps(nested(60, "items"))),
        ("json_schema", json.dumps(nested(10, "anyOf"))),
        ("json_schema", json.dumps({"allOf": [{"anyOf": FIELDS[start : start + 6]} for start in range(0, 48, 6)]})),
        ("json_schema", json.dumps({"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"})),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'),
        ("json_schema", json.dumps({"const": "x" * 60_000})),
        ("json_schema", json.dumps({"properties": {f"p{number}": {} for number in range(3000)}})),
        ("json_schema", json.dumps({"enum": list(range(9000))})),
        ("choice", json.dumps([f"choice {number}" for number in range(3500)])),
        ("choice", json.dumps(["\ud800"])),
        ("regex", "((((a{1,30}){1,30}){1,30}){1,30}){1,30}"),
        ("regex", "(a|b)*a(a|b){1000}"),
        ("regex", "\ud800"),
    ],
)  # fmt: skip
def test_constraints_of_any_kind_are_compiled_or_refused_in_time(tokenizer: Any, kind: Any, spec: str) -> None:
    compiler, before = shared_compiler(tokenizer), memory_mib()
    refusal = ""
    try:
        compiler.check(StructuredOutput(kind, spec))
    except ValueError as error:
        refusal = str(error)
    assert len(refusal) < 1000
    assert memory_mib() - before < 256


@cache
def shared_compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer))
