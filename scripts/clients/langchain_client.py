# packages: langchain-openai
from typing import Literal

from _features import MODEL, URL, feature
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def move(way: Literal["left", "right"]) -> str:
    """Move left or right."""
    return "done"


model = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", max_tokens=16, max_retries=0)
with feature("invoke"):
    answer = model.invoke("left or right?")
    assert answer.usage_metadata["output_tokens"]
with feature("history"):
    model.invoke([("user", "left or right?"), answer, ("user", "and now?")])
with feature("stream"):
    assert list(model.stream("left or right?"))
with feature("bind_tools, strict"):
    model.bind_tools([move], strict=True).invoke("left or right?")
with feature("forced tools"):
    # strict, so that the parameters are finite: LangChain lists a call that is cut under `invalid_tool_calls`
    forced = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", max_tokens=400, seed=1)
    answer = forced.bind_tools([move], tool_choice="move", strict=True).invoke("left or right?")
    assert answer.tool_calls, answer.invalid_tool_calls
