"""If these fail, a hint about episodes or chat templates leads nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from hint_cases import HintCase, case, name_of, sites_without_case

from quintet.config.compose import load_experiment
from quintet.data.chat_templates import CHATML
from quintet.policies.model_loading import load_tokenizer
from quintet.records import Failure
from quintet.rollout.chat.chat_format import ChatFormat
from quintet.rollout.chat.reply_messages import ReplyMessages
from quintet.rollout.episode_limits import FailureMonitor
from quintet.rollout.sampling_params import check_tokens
from quintet.rollout.single_turn_loop import _FailureLimit


def chat(template: str | None) -> None:
    """The chat of a tokenizer with this chat_template.jinja."""
    file = Path("tokenizer/chat_template.jinja")
    file.unlink(missing_ok=True)
    if template is not None:
        file.write_text(template)
    ChatFormat(load_tokenizer("tokenizer"))


def failed(setting: tuple[float, str | None]) -> None:
    """Episodes of which half fail, in the environment or in the engine; None fails in neither."""
    share, where = setting
    monitor = FailureMonitor(share)
    monitor.widen(2)
    monitor.record(None)
    monitor.record(where and Failure(where, "ValueError", "no"))  # type: ignore[arg-type]


def scored(setting: tuple[float, str | None]) -> None:
    """Responses of which half fail."""
    share, where = setting
    limit = _FailureLimit(share)
    limit.add_episodes(2)
    limit.record(where and Failure(where, "ValueError", "no"))  # type: ignore[arg-type]
    limit.check()


def tokens(overrides: list[str]) -> None:
    check_tokens(load_experiment(None, overrides).experiment, 420)


def tool_messages(template: str) -> None:
    ReplyMessages(load_tokenizer("tokenizer"), template, [])


def user_messages(template: str) -> None:
    ReplyMessages(load_tokenizer("tokenizer"), template, role="user")


DOUBLED = "{% for m in messages %}{{ m['content'] * 2 }}<|im_end|>{% endfor %}"
CHANGED = "{% for m in messages %}{{ m['content'] | replace(' ', '_') }}<|im_end|>{% endfor %}"
OPEN = "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}"
SAVE = "save a chat_template.jinja next to the tokenizer that "
FAULTS = "or raise env.max_failed_share (now 0.25); docs/faults.md explains how failures are handled"
TOOLS = "{# tools, <tool_call> #}"
ANOTHER_TEMPLATE = "data.template=hermes, or a model whose template writes tool calls as JSON between <tool_call> tags"
WITHOUT_RESULTS = "{% for m in messages if m['role'] != 'tool' %}{{ m['content'] }}<|im_end|>{% endfor %}"
CASES = [
    *(
        case(tool_messages, template, ANOTHER_TEMPLATE, "hermes")
        for template in (CHATML, f"{TOOLS}{WITHOUT_RESULTS}", f"{TOOLS}{CHANGED}", f"{TOOLS}{OPEN}")
    ),
    case(tool_messages, f"{TOOLS}{{{{ raise_exception('no tools') }}}}", ANOTHER_TEMPLATE, "hermes"),
    *(
        case(user_messages, template, "data.template=chatml, or another template that writes each message", "chatml")
        for template in (CHANGED, OPEN, "{{ raise_exception('one user') }}")
    ),
    case(chat, None, f"{SAVE}writes every message once, in order, as those in docs/exact-tokens.md do", CHATML),
    case(chat, "{{ messages[-1]['content'] }}<|im_end|>", f"{SAVE}writes every message, in order", CHATML),
    case(chat, DOUBLED, f"{SAVE}writes every message once", CHATML),
    case(chat, CHANGED, f"{SAVE}writes messages unchanged or stripped", CHATML),
    case(chat, "{{ raise_exception('never') }}", f"{SAVE}accepts user and assistant messages in turns", CHATML),
    case(chat, OPEN, f"{SAVE}ends every response with <|im_end|>", CHATML),
    case(failed, (0.25, "step"), f"fix the environment, {FAULTS}", (0.25, None), (0.5, "step")),
    case(failed, (0.25, "engine"), f"fix the engine, {FAULTS}", (0.25, None), (0.5, "engine")),
    case(
        scored,
        (0.25, "reward"),
        "fix the reward function, or raise reward.max_failed_share (now 0.25)",
        (0.25, None),
        (0.5, "reward"),
    ),
    case(
        scored,
        (0.25, "engine"),
        "fix the engine, or raise reward.max_failed_share (now 0.25)",
        (0.25, None),
        (0.5, "engine"),
    ),
    case(
        scored,
        (0.25, "interaction"),
        "fix the user, or raise reward.max_failed_share (now 0.25)",
        (0.25, None),
        (0.5, "interaction"),
    ),
    case(tokens, ["rollout.pad_token=420"], "remove rollout.pad_token: the tokenizer defines it", []),
]
EXEMPT = {"rollout/engines/": "engines/test_engine_hints.py follows them"}


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_directory: Path) -> None:
    monkeypatch.chdir(tmp_path)
    load_tokenizer(policy_directory).save_pretrained(tmp_path / "tokenizer")


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_about_episodes_removes_its_error(entry: HintCase) -> None:
    entry.check()


def test_every_hint_about_episodes_is_followed() -> None:
    assert not sites_without_case("rollout", CASES, EXEMPT)
