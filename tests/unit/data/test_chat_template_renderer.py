"""If these fail, the chat template of a downloaded model stops a run or fills the memory, or changes the text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import date, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quintet.data import chat_template_renderer
from quintet.data.chat_template_renderer import TemplateLimitError, TemplateRenderingError, render_chat_template
from quintet.data.chat_templates import KEY, TEMPLATES, ChatTemplate
from quintet.data.conversations import Conversation, ConversationFormat
from quintet.data.prompt_format import PromptFormat
from quintet.errors import ConfigError
from quintet.policies.reward_model import _SequenceEncoder
from quintet.policies.tiny_models import train_tokenizer
from quintet.records import PromptRow
from quintet.rollout.chat.chat_format import ChatFormat
from quintet.runtime.serving.body_parts import Message
from quintet.runtime.serving.request_schema import ChatBody, RequestError
from quintet.runtime.serving.tokenization import ChatTokenizer

TALK: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Kürze <b> & 'Witz' 🙂\n"},
    {"role": "user", "content": " up or down? "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nup"},
    {"role": "user", "content": "and now?"},
)
HANGING = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
MEMORY = "{{ 'x' * 10 ** 9 }}"
OUTPUT = "{% for i in range(2000) %}{{ 'x' * 10 ** 5 }}{% endfor %}"
LIMITS = {HANGING: "2 s of processor time", MEMORY: "512 MiB of memory", OUTPUT: "1,048,576 characters"}


def tokenizer_with(template: str | None) -> Any:
    tokenizer = train_tokenizer(320, ["user up or down"])
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.name_or_path = "/models/downloaded"
    return tokenizer


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Processes of this test alone."""
    started = chat_template_renderer._Processes()
    monkeypatch.setattr(chat_template_renderer, "_processes", lambda: started)
    yield started
    started._pool.close()


def serve(tokenizer: Any) -> None:
    messages = [Message(role="user", content="up")]
    ChatTokenizer(tokenizer, ()).render(ChatBody.model_construct(messages=messages, chat_template_kwargs={}))


CALL_SITES: dict[str, Callable[[Any], object]] = {
    "serve": serve,
    "rollout": ChatFormat,
    "prompts": lambda made: PromptFormat(made, max_tokens=8).text(PromptRow(0, "", TALK)),
    "conversations": lambda made: ConversationFormat(made).encode(Conversation(TALK)),
    "reward model": lambda made: _SequenceEncoder(made, 8).encode([PromptRow(0, "", TALK)], ["up"]),
}


@pytest.mark.parametrize("site", CALL_SITES)
@pytest.mark.parametrize("template", [MEMORY, OUTPUT])
def test_no_caller_is_exhausted_by_a_template(site: str, template: str) -> None:
    with pytest.raises((TemplateLimitError, RequestError)) as caught:
        CALL_SITES[site](tokenizer_with(template))
    assert "the chat template of /models/downloaded exceeds" in str(caught.value)
    assert LIMITS[template] in str(caught.value)
    assert "use another model directory" in str(caught.value)


@pytest.mark.parametrize("template", [HANGING, "{{ 7 ** (7 ** 9) }}"])
def test_a_template_that_never_ends_is_stopped_and_named(template: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(template)
    with pytest.raises(TemplateLimitError, match=f"the chat template of {file} exceeds .* 2 s of processor time"):
        PromptFormat(tokenizer_with(None), str(file), max_tokens=8).text(PromptRow(0, "", TALK))
    # the next conversation is rendered by another process
    assert render_chat_template(tokenizer_with("{{ 6 * 7 }}"), TALK, add_generation_prompt=True) == "42"


TOOLS = [{"type": "function", "function": {"name": "gehe", "parameters": {"größe": [1, 2.5, None, True]}}}]
FEATURES = (
    "{{ bos_token }}{{ eos_token }}|{{ tools | tojson }}|{{ tools | tojson(indent=2) if tools }}|{{ documents }}",
    "{{ messages | tojson(ensure_ascii=true, sort_keys=true) }}{{ messages[0] }}",
    "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.content | trim }}\n"
    "    {% if loop.index > 2 %}\n{% break %}\n    {% endif %}\n{% endfor %}\n",
    "{% for m in messages %}{% generation %}{{ m['content'] }}\n{% endgeneration %}{% endfor %}",
    "{%- set space = namespace(n=0) -%}{%- macro twice(x) -%}{{ x }}{{ x }}{%- endmacro -%}\n{# no #}\n"
    "{% for m in messages %}{% set space.n = space.n + 1 %}{{ twice(m.role) ~ space.n }} \n{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}{{ enable_thinking is defined }}",
    "{% for m in messages[::-1] %}{{ m['role'].upper().split('S')[-1] }}{{ m.tool_calls is defined }}{% endfor %}",
    "{{ strftime_now('%d %b %Y') }}",
    "{{ raise_exception('only user and assistant: ' ~ messages[0].role) }}",
    "{{ messages[9].content }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{% for m in messages %}",
    "{{ messages | tojson('x') + 1 }}",
    "{{ {}['role'] }}{{ messages[0]['no'] }}",
)
FAMILIES = sorted((Path(__file__).parents[1] / "rollout" / "chat" / "templates").glob("*.jinja"))


@cache
def shared_tokenizer() -> Any:
    tokenizer = tokenizer_with(None)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    return tokenizer


def by_transformers(tokenizer: Any, variables: dict[str, Any]) -> str:
    try:
        return str(tokenizer.apply_chat_template([dict(message) for message in TALK], tokenize=False, **variables))
    except Exception as error:  # noqa: BLE001 - compared with ours
        return f"error: {error}"


@pytest.mark.parametrize("template", [*FEATURES, *(file.read_text() for file in FAMILIES)])
def test_the_text_is_that_of_transformers(template: str) -> None:
    tokenizer = shared_tokenizer()
    tokenizer.chat_template = template
    for variables in ({}, {"tools": TOOLS, "enable_thinking": False}):
        for prompt in (False, True):
            try:
                text = render_chat_template(tokenizer, TALK, add_generation_prompt=prompt, variables=variables)
            except TemplateRenderingError as error:
                text = f"error: {error}"
            assert text == by_transformers(tokenizer, {**variables, "add_generation_prompt": prompt})


def test_a_fixed_date_and_the_thinking_option_reach_the_template() -> None:
    template = ChatTemplate("{{ strftime_now('%d.%m.%Y') }} {{ enable_thinking }}", thinking=False)
    arguments = (shared_tokenizer(), TALK, template)
    assert render_chat_template(*arguments, add_generation_prompt=False, day=date(2024, 7, 26)) == "26.07.2024 False"
    assert render_chat_template(*arguments, add_generation_prompt=False) == f"{datetime.now():%d.%m.%Y} False"


@pytest.mark.parametrize("template", [None, *(template.text for template in TEMPLATES.values() if template.text)])
def test_templates_of_this_program_start_no_process(template: str | None, processes: Any) -> None:
    assert render_chat_template(tokenizer_with(template), TALK, add_generation_prompt=True)
    assert not processes._pool._fork_servers


def test_idle_processes_that_died_are_replaced(processes: Any) -> None:
    tokenizer = tokenizer_with("{{ messages | length }}")
    for end in (lambda: processes._kill(processes._idle[0]), lambda: processes._pool._fork_servers[0]._process.kill()):
        assert render_chat_template(tokenizer, TALK, add_generation_prompt=True) == "4"
        end()
    assert render_chat_template(tokenizer, TALK, add_generation_prompt=True) == "4"


def test_a_forked_process_has_processes_of_its_own() -> None:
    tokenizer = tokenizer_with("{{ messages[0].content }}")
    assert render_chat_template(tokenizer, TALK, add_generation_prompt=True) == TALK[0]["content"]
    ours = chat_template_renderer._processes()
    child = os.fork()
    if child == 0:
        os._exit(0 if chat_template_renderer._processes() is not ours else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_error_of_a_configured_template_names_its_key() -> None:
    with pytest.raises(ConfigError, match=f"the chat template of {KEY} exceeds"):
        PromptFormat(tokenizer_with(None), MEMORY, max_tokens=8).text(PromptRow(0, "", TALK))


def test_a_tokenizer_class_with_its_own_rendering_is_called() -> None:
    class Tokenizer(PreTrainedTokenizerFast):
        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return "rendered by its own code"

    tokenizer = Tokenizer(tokenizer_object=shared_tokenizer().backend_tokenizer, chat_template="{{ messages }}")
    assert render_chat_template(tokenizer, TALK, add_generation_prompt=True) == "rendered by its own code"
