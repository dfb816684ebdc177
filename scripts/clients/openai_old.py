# packages: openai==1.109.1
from _features import MODEL, SCHEMA, URL, feature
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Move(BaseModel):
    way: str


client = OpenAI(base_url=URL, api_key="none", max_retries=0)
messages = [{"role": "user", "content": "left or right?"}]
chat = {"model": MODEL, "messages": messages, "max_completion_tokens": 16}
with feature("chat"):
    answer = client.chat.completions.create(**chat, seed=-1, store=True, temperature=0.001)
    assert answer.usage.completion_tokens
with feature("history from model_dump"):
    history = [*messages, answer.choices[0].message.model_dump(), *messages]
    client.chat.completions.create(model=MODEL, messages=history, max_tokens=4)
with feature("stream"):
    options = {"include_usage": True}
    events = list(client.chat.completions.create(**chat, stream=True, stream_options=options))
    assert events[-1].usage.completion_tokens
with feature("logprobs"):
    choice = client.chat.completions.create(**chat, logprobs=True, top_logprobs=3).choices[0]
    assert len(choice.logprobs.content[0].top_logprobs) == 3
with feature("strict tools"):
    client.chat.completions.create(**chat, tools=[pydantic_function_tool(Move)])
with feature("forced tools"):
    tool = {"type": "function", "function": {"name": "move", "parameters": SCHEMA, "strict": True}}
    calls = (
        client.chat.completions.create(
            model=MODEL, messages=messages, tools=[tool], tool_choice="required", max_tokens=400, seed=1
        )
        .choices[0]
        .message.tool_calls
    )
    assert calls[0].function.name == "move"
with feature("parse"):
    client.chat.completions.create(
        model=MODEL, messages=messages, response_format={"type": "json_object"}, max_tokens=200
    )
with feature("penalties and bias"):
    client.chat.completions.create(**chat, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"40": 5}, top_p=0)
with feature("completions with echo"):
    scored = client.completions.create(model=MODEL, prompt="left or right", echo=True, logprobs=1, max_tokens=0)
    assert scored.choices[0].logprobs.token_logprobs[1] < 0
with feature("models"):
    assert client.models.retrieve(MODEL).id == client.models.list().data[0].id
with feature("responses"):
    response = client.responses.create(model=MODEL, input="left or right?", max_output_tokens=16)
    assert response.usage.output_tokens
with feature("context overflow"):
    try:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "left " * 50_000}])
    except BadRequestError as error:
        assert error.code == "context_length_exceeded"
    else:
        raise AssertionError("no error")
