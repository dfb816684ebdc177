"""If these fail, fine-tuning learns the user's words, or forgets part of the assistant's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.config.native.data import DataConfig
from quintet.data import conversations as conversations_module
from quintet.data.chat_templates import TEMPLATES
from quintet.data.conversations import (
    Conversation,
    ConversationFormat,
    TokenizedConversations,
    TokenSequence,
    parse_conversation,
    truncate_sequence,
)
from quintet.errors import ConfigError
from quintet.policies import tiny_models

LLAMA = (
    "{{ '<|begin|>' }}{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>\n\n{{ m['content'] | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
"""Llama 3's form: trimmed words, an end of turn that isn't the end of text, nothing behind it."""
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen3's form: thoughts of earlier replies are left out."""
BEGUN = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|A|>{{ m['content'].split('</think>')[-1] }}<|im_end|>"
    "{% else %}<|U|>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|A|><think>\n{% endif %}"
)
"""DeepSeek-R1's form: the policy is asked to go on thinking, and finished replies show no thoughts."""
UNMARKED = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt }}"
)
REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"
TWO_TURNS = (
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Up or down?"},
    {"role": "assistant", "content": "Up"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Down, then up"},
)


def tokenizer(template: str | None = None) -> Any:
    conversations = tiny_models.train_tokenizer(420, ["system\nuser\nassistant\n Up Down or now"])
    if template is not None:
        signs = ["<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<|A|>", "<|U|>"]
        conversations.add_special_tokens({"additional_special_tokens": signs}, replace_extra_special_tokens=False)
        conversations.chat_template = template
    return conversations


def parts(conversations: Any, passage: TokenSequence) -> list[tuple[str, bool]]:
    """What is learnt and what isn't, as text, in order."""
    results: list[tuple[list[int], bool]] = []
    for token, own in zip(passage.tokens, passage.loss_mask, strict=True):
        if not results or results[-1][1] != own:
            results.append(([], own))
        results[-1][0].append(token)
    return [(conversations.decode(tokens, skip_special_tokens=False), own) for tokens, own in results]


def learnt(template: str | None, messages: Sequence[dict[str, Any]], first: int = 0) -> list[list[tuple[str, bool]]]:
    conversations = tokenizer(template)
    return [
        parts(conversations, p) for p in ConversationFormat(conversations).encode(Conversation(tuple(messages), first))
    ]


def test_chatml_replies_and_their_end_tokens_are_learnt() -> None:
    assert learnt(None, TWO_TURNS) == [
        [
            (
                "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nUp or down?<|im_end|>\n"
                "<|im_start|>assistant\n",
                False,
            ),
            ("Up<|im_end|>", True),
            ("\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n", False),
            ("Down, then up<|im_end|>", True),
        ]
    ]


def test_llamas_replies_end_with_the_end_of_their_turn() -> None:
    spaced = [{**message, "content": f" {message['content']}\n"} for message in TWO_TURNS[1:]]
    assert learnt(LLAMA, spaced) == [
        [
            ("<|begin|><|head|>user<|/head|>\n\nUp or down?<|eot|><|head|>assistant<|/head|>\n\n", False),
            ("Up<|eot|>", True),
            ("<|head|>user<|/head|>\n\nAnd now?<|eot|><|head|>assistant<|/head|>\n\n", False),
            ("Down, then up<|eot|>", True),
        ]
    ]


def test_only_the_response_to_a_prompt_is_trained() -> None:
    ((*_, (before, asked), (answer, own)),) = learnt(None, TWO_TURNS, first=4)
    assert "Up<|im_end|>" in before
    assert not asked
    assert (answer, own) == ("Down, then up<|im_end|>", True)


def test_where_earlier_thoughts_are_dropped_each_reply_has_a_sequence() -> None:
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>a</think>\nb"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "<think>c</think>\nd"},
    ]
    asked = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert learnt(THINKING, talk) == [
        [(asked, False), ("<think>a</think>\nb<|im_end|>", True)],
        [
            (f"{asked}b<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n", False),
            ("<think>c</think>\nd<|im_end|>", True),
        ],
    ]


@pytest.mark.parametrize("message", ["<think>\na</think>b", "a</think>b"])
def test_thoughts_that_the_template_leaves_out_of_the_reply_itself_are_learnt(message: str) -> None:
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": message}]
    assert learnt(BEGUN, talk) == [[("<|U|>one<|A|><think>\n", False), ("a</think>b<|im_end|>", True)]]


def test_a_template_without_end_tokens_gets_one_after_the_last_reply() -> None:
    assert learnt(UNMARKED, TWO_TURNS[1:3]) == [[("user: Up or down?\nassistant:", False), (" Up<|im_end|>", True)]]


def test_a_conversation_that_the_assistant_begins() -> None:
    assert learnt(None, TWO_TURNS[2:3]) == [[("<|im_start|>assistant\n", False), ("Up<|im_end|>", True)]]


def test_a_rendered_prompt_is_not_templated_again() -> None:
    conversations = tokenizer()
    (passage,) = ConversationFormat(conversations).encode(Conversation(prompt="Q: or\nA:", answer=" Up"))
    assert parts(conversations, passage) == [("Q: or\nA:", False), (" Up<|im_end|>", True)]


def test_sentencepiece_tokenizers_encode_all_pieces_jointly() -> None:
    """As Llama 2's: by itself "Up" would become "▁Up", which isn't what follows a line break."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    arguments = ["<unk>", "</s>", "▁[INST]", "▁a", "▁b", "▁[/INST]", "▁Up", "▁"]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(arguments)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    conversations = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", unk_token="<unk>")
    conversations.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %} "
        "{{ m['content'] }}</s>{% endif %}{% endfor %}"
    )
    talk = ({"role": "user", "content": "a b"}, {"role": "assistant", "content": "Up"})
    (passage,) = ConversationFormat(conversations).encode(Conversation(talk))
    tokens = conversations.convert_ids_to_tokens(list(passage.tokens))
    assert [(t, o) for t, o in zip(tokens, passage.loss_mask, strict=True)] == [
        ("▁[INST]", False),
        ("▁a", False),
        ("▁b", False),
        ("▁[/INST]", False),
        ("▁Up", True),
        ("</s>", True),
    ]


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_exactly_the_replies_are_trained_for_any_messages(said: list[str]) -> None:
    conversations = FIXED
    roles = ["user", "assistant"] * 3
    talk = tuple({"role": role, "content": text} for role, text in zip(roles, said, strict=False))
    passages = ConversationFormat(conversations).encode(Conversation(talk))
    own = [token for passage in passages for token, o in zip(passage.tokens, passage.loss_mask, strict=True) if o]
    replies = [m["content"] for m in talk if m["role"] == "assistant"]
    assert own == [
        token for reply in replies for token in [*conversations.encode(reply, add_special_tokens=False), END]
    ]
    if len(passages) == 1:
        whole = conversations.apply_chat_template(list(talk), tokenize=False)
        assert whole.startswith(conversations.decode(passages[0].tokens, skip_special_tokens=False))


FIXED = tokenizer()
END = FIXED.eos_token_id


def read(row: dict[str, Any], **keys: Any) -> Conversation:
    return parse_conversation(row, DataConfig(**keys), 3, "x.jsonl, row 3")


def test_rows_are_read_from_the_configured_columns() -> None:
    asked = {"role": "user", "content": "2 + 3?"}
    answered = Conversation((asked, {"role": "assistant", "content": "5"}), first_trained=1)
    assert read({"prompt": "2 + 3?", "answer": "5"}) == answered
    assert read({"prompt": [asked], "response": "5", "answer": "no"}) == answered
    assert read({"info": {"q": "2 + 3?"}, "a": "5"}, prompt_key="info.q", response_key="a") == answered
    whole = {"messages": [asked | {"name": None}, {"role": "assistant", "content": "5", "name": None}]}
    assert read(whole, messages_key="messages") == Conversation(answered.messages)
    written = {"messages": '[{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]'}
    assert read(written, messages_key="messages") == Conversation(answered.messages)
    system = {"role": "system", "content": "Be short."}
    assert read(whole, messages_key="messages", system_prompt="Be short.").messages[0] == system
    assert read({"messages": [system, asked]}, messages_key="messages", system_prompt="x").messages[0] == system
    rendered = parse_conversation({"prompt": "Q:", "answer": "5"}, DataConfig(), 0, "x", rendered=True)
    assert (rendered.prompt, rendered.answer) == ("Q:", "5")


@pytest.mark.parametrize(
    ("row", "keys", "parts"),
    [
        ({"prompt": "a"}, {}, ["no response", "data.response_key", "x.jsonl, row 3"]),
        ({"message": []}, {"messages_key": "messages"}, ["messages", "data.messages_key=message"]),
        ({"messages": "hello"}, {"messages_key": "messages"}, ["no chat messages"]),
        ({"messages": [{"content": "a"}]}, {"messages_key": "messages"}, ["`role`"]),
        ({"question": "a", "answer": "b"}, {}, ["prompt", "question"]),
    ],
)
def test_rows_without_messages_are_named(row: dict[str, Any], keys: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read(row, **keys)
    for word in parts:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, TWO_TURNS[:2], "no reply to train on"),
        (REFUSING, TWO_TURNS, "no system here"),
        ("{{ messages | length }}", TWO_TURNS, "is not found"),
    ],
)
def test_a_conversation_that_the_template_rejects_is_an_error(
    template: str | None, messages: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ConversationFormat(tokenizer(template)).encode(Conversation(messages), "row 7")


def test_a_template_can_be_configured_for_a_tokenizer_without_one() -> None:
    bare = tokenizer()
    bare.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ConversationFormat(bare).encode(Conversation(TWO_TURNS))
    (passage,) = ConversationFormat(bare, "chatml").encode(Conversation(TWO_TURNS))
    assert parts(bare, passage)[-1] == ("Down, then up<|im_end|>", True)


def test_sequences_that_are_too_long_are_refused_or_cut() -> None:
    passage = TokenSequence((1, 2, 3, 4, 5, 6), (False, False, True, True, False, True))
    assert truncate_sequence(passage, 6, "error", "row 1") is passage
    with pytest.raises(ConfigError, match=r"row 1 has 6 tokens, more than sft\.max_tokens = 5"):
        truncate_sequence(passage, 5, "error", "row 1")
    # the first token left can't be learnt: nothing stands before it
    assert truncate_sequence(passage, 4, "left", "") == TokenSequence((3, 4, 5, 6), (False, True, False, True))
    assert truncate_sequence(passage, 4, "right", "") == TokenSequence((1, 2, 3, 4), (False, False, True, True))
    assert truncate_sequence(passage, 3, "middle", "") == TokenSequence((1, 5, 6), (False, False, True))


def test_batches_hold_sequences_end_to_end() -> None:
    one, two = TokenSequence((1, 2, 3), (False, True, True)), TokenSequence((4, 5), (False, True))
    rows = TokenizedConversations([[one], [TokenSequence((9, 9), (False, False))], [two, one]])
    assert (len(rows), rows.num_input_rows, rows.included_rows) == (2, 3, [0, 2])
    batch = rows.batch([1, 0])
    assert batch.tokens.tolist() == [4, 5, 1, 2, 3, 1, 2, 3]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    assert batch.loss_mask.tolist() == [False, True, False, True, True, False, True, True]
    assert batch.turn_end.tolist() == [False, True, False, False, True, False, False, True]
    assert batch.lengths.tolist() == [2, 3, 3]
    assert batch.trajectory.tolist() == [0, 0, 1]
    assert batch.tokens.dtype == torch.int64


def test_blanks_at_the_end_of_a_reply_are_trained_where_no_token_ends_it() -> None:
    talk = [{"role": "user", "content": "or"}, {"role": "assistant", "content": "Up \n"}, *TWO_TURNS[1:3]]
    (pieces,) = learnt(UNMARKED, talk)
    assert pieces[1] == (" Up ", True)


@pytest.mark.parametrize("template", [None, UNMARKED, LLAMA])
def test_a_reply_that_ends_with_its_thought_is_trained_to_the_end(template: str | None) -> None:
    talk = [{"role": "user", "content": "or"}, {"role": "assistant", "content": "<think>\na\n</think>"}]
    (pieces,) = learnt(template, [*talk, *TWO_TURNS[1:3]])
    assert pieces[1][0].lstrip().startswith("<think>\na\n</think>")
    assert pieces[-1][0].lstrip().startswith("Up")


def test_an_empty_thought_of_the_prompt_stays_where_the_template_leaves_it_out_of_replies() -> None:
    conversations = tokenizer()
    form = ConversationFormat(conversations, "qwen3_nonthinking")
    first, last = (parts(conversations, each) for each in form.encode(Conversation(TWO_TURNS)))
    for (before, _), (reply, _) in (first, last):
        assert before.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert reply in ("Up<|im_end|>", "Down, then up<|im_end|>")


TEXTS = st.text(st.sampled_from(" \nUp.Dow<|_>'"), min_size=1, max_size=12)


@pytest.mark.parametrize("template", [None, LLAMA, THINKING, BEGUN, UNMARKED, *(n for n in TEMPLATES if n != "native")])
@settings(max_examples=8, deadline=None)
@given(turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=3, max_size=5), system=st.booleans(), data=st.data())
def test_replies_are_the_same_from_one_rendering_as_one_by_one(
    template: str | None, turns: list[tuple[str, str]], system: bool, data: st.DataObject
) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be short."}] if system else []
    for question, reply in turns:
        weight = {"weight": 0} if data.draw(st.sampled_from([False, False, True])) else {}
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply, **weight}]
    form = ConversationFormat(
        tokenizer(None if template in TEMPLATES else template), template if template in TEMPLATES else None
    )

    def encode() -> list[TokenSequence] | str:
        try:
            return form.encode(Conversation(tuple(messages)))
        except ConfigError as error:
            return str(error)

    together = encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversations_module, "render_plain_replies", lambda *_: None)
        assert encode() == together


def test_a_long_conversation_is_rendered_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as a whole, the last reply three times, the first reply three times: whatever the number of turns."""
    form = ConversationFormat(tokenizer(), "chatml")
    rendered: list[int] = []
    render = form._renderer.render

    def counted(dialogues: Any, *arguments: Any) -> list[str]:
        rendered.extend(len(messages) for messages, _ in dialogues)
        return render(dialogues, *arguments)

    monkeypatch.setattr(form._renderer, "render", counted)
    turns = [{"role": role, "content": f"Up {n}"} for n in range(30) for role in ("user", "assistant")]
    (sequence,) = form.encode(Conversation(tuple(turns)))
    assert sum(token == form._tokenizer.eos_token_id for token in sequence.tokens) == 60
    assert sorted(rendered) == [1, 2, 2, 59, 60, 60, 60, 60]
