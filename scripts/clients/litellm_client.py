# packages: litellm
import litellm
from _features import MODEL, SCHEMA, URL, feature

litellm.suppress_debug_info = True
messages = [{"role": "user", "content": "left or right?"}]
chat = {"model": f"openai/{MODEL}", "messages": messages, "api_base": URL, "api_key": "none", "max_tokens": 16}
with feature("chat"):
    answer = litellm.completion(**chat)
    assert answer.usage.completion_tokens
with feature("history from model_dump"):
    litellm.completion(**{**chat, "messages": [*messages, answer.choices[0].message.model_dump(), *messages]})
with feature("stream"):
    assert list(litellm.completion(**chat, stream=True))
with feature("tools"):
    tool = {"type": "function", "function": {"name": "move", "parameters": SCHEMA}}
    litellm.completion(**chat, tools=[tool])
with feature("context overflow"):
    try:
        litellm.completion(**{**chat, "messages": [{"role": "user", "content": "left " * 50_000}]})
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("no error")
