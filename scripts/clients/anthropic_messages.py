# packages: anthropic
from _features import MODEL, SCHEMA, URL, feature
from anthropic import Anthropic

client = Anthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0)
messages = [{"role": "user", "content": "left or right?"}]
with feature("messages"):
    assert client.messages.create(model=MODEL, messages=messages, max_tokens=16).usage.output_tokens
with feature("stream"), client.messages.stream(model=MODEL, messages=messages, max_tokens=16) as stream:
    assert stream.get_final_message().usage.output_tokens
with feature("tools"):
    tools = [{"name": "move", "input_schema": SCHEMA}]
    choice = {"type": "any"}
    answer = client.messages.create(model=MODEL, messages=messages, max_tokens=400, tools=tools, tool_choice=choice)
    assert answer.content[0].type == "tool_use"
with feature("results of tools"):
    call = {"type": "tool_use", "id": "a", "name": "move", "input": {"way": "left"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "done"}
    history = [*messages, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    client.messages.create(model=MODEL, messages=history, max_tokens=16, tools=tools)
with feature("count_tokens"):
    assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
