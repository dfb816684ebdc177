"""If these fail, sessions of an external agent are trained on other tokens than the policy sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quintet.records import FinishReason, Outcome, Trajectory
from quintet.rollout.collate import collate
from quintet.rollout.sessions import Exchange, Prompt, Session, build_turns, read_session

END = 0
"""Written as `$`; letters are their code points; the policy also samples tokens that encoding never returns."""
SPELT = {END: "$", 900: "ab", 901: "a"}


def encode(text: str) -> tuple[int, ...]:
    return tuple(END if letter == "$" else ord(letter) for letter in text)


def spelt(token: int) -> str:
    return SPELT.get(token, chr(token))


def exchange(asked: str, tokens: tuple[int, ...], number: int = 0, choice: int = 0, **changes: object) -> Exchange:
    closed = tokens[-1:] == (END,)
    text = "".join(spelt(token) for token in (tokens[:-1] if closed else tokens))
    fields = {
        "number": number,
        "choice": choice,
        "prompt": Prompt(encode(asked), asked, shown=asked),
        "tokens": tokens,
        "logprobs": tuple(-0.5 - place for place in range(len(tokens))),
        "text": text,
        "closed": closed,
        "finish_reason": FinishReason.STOP if closed else FinishReason.LENGTH,
        "weight_version": 7,
    }
    return Exchange(**(fields | changes))


def session(*exchanges: Exchange) -> Session:
    made = Session()
    made.add(exchanges)
    return made


def prompt(known: Session, text: str) -> Prompt:
    return known.prompt(text, encode, encode, spelt)


def test_a_repeated_completion_keeps_its_tokens() -> None:
    """`ab` was sampled as one token, which encoding the text never returns."""
    known = session(exchange("u:x$p:", (900, END)))
    actual = prompt(known, "u:x$p:ab$u:y$p:")
    assert actual.tokens == (*encode("u:x$p:"), 900, END, *encode("u:y$p:"))
    assert actual.reused == len("u:x$p:") + 2


def test_a_truncated_completion_is_closed_by_the_template() -> None:
    known = session(exchange("u:x$p:", (900, ord("c"))))
    actual = prompt(known, "u:x$p:abc$u:y$p:")
    assert actual.tokens == (*encode("u:x$p:"), 900, ord("c"), *encode("$u:y$p:"))


def test_the_longest_matching_dialogue_is_reused() -> None:
    first = exchange("p:", (900, END))
    second = exchange("p:ab$u:y$p:", (901, END), 1, prompt=Prompt(first.sequence + encode("u:y$p:"), "p:ab$u:y$p:"))
    actual = prompt(session(first, second), "p:ab$u:y$p:a$u:z$p:")
    assert actual.tokens == (*encode("p:"), 900, END, *encode("u:y$p:"), 901, END, *encode("u:z$p:"))


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ((900, END), "u:x$p:abc$u:y$p:"),  # another reply, though it begins alike: the sampled one had ended there
        ((900, END), "u:x$p:b$u:y$p:"),  # the template left something out
        ((900, END), "u:X$p:ab$u:y$p:"),  # another prompt
        ((900, ord("\n")), "u:x$p:ab$u:y$p:"),  # the template trims
    ],
)
def test_a_changed_history_is_encoded_again(reply: tuple[int, ...], text: str) -> None:
    actual = prompt(session(exchange("u:x$p:", reply)), text)
    assert (actual.tokens, actual.reused) == (encode(text), 0)


def test_a_completion_with_another_end_token_is_encoded_again() -> None:
    other = exchange("u:x$p:", (900, 35), closed=True, text="ab")
    actual = prompt(session(other), "u:x$p:ab$u:y$p:")
    assert (actual.tokens, actual.reused) == (encode("u:x$p:ab$u:y$p:"), 0)


def test_turns_continue_when_the_prompt_starts_with_the_previous_tokens() -> None:
    first = exchange("u:x$p:", (900, END))
    known = session(first)
    second = exchange("", (901, END), 1, prompt=prompt(known, "u:x$p:ab$u:y$p:"))
    turns = build_turns([first, second])
    assert [turn.continues for turn in turns] == [False, True]
    assert turns[1].prompt == encode("u:y$p:")
    batch = collate([Trajectory("agent", 0, 0, 0, turns, Outcome.SUCCESS)])
    assert batch.tokens.tolist() == [*encode("u:x$p:"), 900, END, *encode("u:y$p:"), 901, END]
    assert batch.lengths.tolist() == [len(batch.tokens)]
    assert batch.loss_mask.tolist() == [False] * 6 + [True] * 2 + [False] * 6 + [True] * 2
    torch.testing.assert_close(batch.logprobs[batch.loss_mask], torch.tensor([-0.5, -1.5, -0.5, -1.5]))


def test_other_tokens_of_the_same_text_start_a_new_sequence() -> None:
    """Encoding the completion again results in two tokens instead of the sampled one: training must not use them."""
    turns = build_turns([exchange("u:x$p:", (900, END)), exchange("u:x$p:ab$u:y$p:", (901, END), 1)])
    assert [turn.continues for turn in turns] == [False, False]
    assert turns[1].prompt == encode("u:x$p:ab$u:y$p:")


def test_parallel_completions_and_conversations_are_separate_sequences() -> None:
    exchanges = [exchange("p:", (5, END)), exchange("p:", (6, END), choice=1), exchange("q:", (7, END), 1)]
    turns = build_turns(session(*exchanges))
    assert [turn.continues for turn in turns] == [False] * 3
    assert [turn.tokens for turn in turns] == [(5, END), (6, END), (7, END)]


def test_continuing_a_truncated_completion_adds_no_tokens() -> None:
    turns = build_turns([exchange("p:", (5, 6)), exchange("", (7, END), 1, prompt=Prompt((*encode("p:"), 5, 6)))])
    assert turns[1].continues
    assert turns[1].prompt == ()


def test_turns_have_the_fields_that_training_needs() -> None:
    one = exchange("p:", (5, 6), reward=0.5, version_changes=((1, 8),))
    (turn,) = build_turns([one, exchange("p:", (), 1)])
    assert (turn.logprobs, turn.weight_version, turn.version_changes) == ((-0.5, -1.5), 7, ((1, 8),))
    assert (turn.reward, turn.finish_reason, turn.valid_format) == (0.5, FinishReason.LENGTH, False)
    assert (turn.observation, turn.text) == ("p:", "\x05\x06")


def test_exchanges_are_in_request_order() -> None:
    made = Session()
    first, second = made.next_request_number(), made.next_request_number()
    made.add([exchange("q:", (7, END), second)])
    made.add([exchange("p:", (5, END), first, 1), exchange("p:", (4, END), first)])
    assert [known.tokens[0] for known in made.exchanges] == [4, 5, 7]


def test_rewards_are_added_to_the_latest_exchange() -> None:
    made = Session()
    with pytest.raises(ValueError, match="cannot be rewarded"):
        made.reward(1.0)
    made.add([exchange("p:", (5, END)), exchange("q:", (6, END), 1)])
    made.reward(1.0)
    made.reward(-0.25)
    assert [known.reward for known in made.exchanges] == [0.0, 0.75]
    for value in (-0.75, 0.1, 0.2, -0.3):
        made.reward(value)
    assert [known.reward for known in made.exchanges] == [0.0, 0.0]


def test_a_session_round_trips_through_json() -> None:
    kept = [
        exchange("p:é\n", (5, END), version_changes=((1, 2),), notes={"user": "me"}),
        replace(exchange("", (6, 9), 1), prompt=Prompt((1, 2, 3))),
    ]
    assert list(read_session("".join(f"{exchange.to_json()}\n" for exchange in kept))) == kept
    former = "".join(f"{exchange.to_json()}\n" for exchange in kept)
    for name, former_name in (("finish_reason", "stop"), ("version_changes", "switches")):
        former = former.replace(f'"{name}"', f'"{former_name}"')
    assert list(read_session(former)) == kept, "sessions that an earlier version recorded"
    with pytest.raises(ValueError, match="not an exchange of a session"):
        read_session('{"request": 0}')
