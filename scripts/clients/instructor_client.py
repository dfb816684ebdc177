# packages: instructor
from typing import Literal

import instructor
from _features import MODEL, URL, feature
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class Move(BaseModel):
    model_config = ConfigDict(extra="forbid")
    way: Literal["left", "right"]


plain = OpenAI(base_url=URL, api_key="none", max_retries=0)
messages = [{"role": "user", "content": "left or right?"}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    with feature(mode.value):
        client = instructor.from_openai(plain, mode=mode)
        move = client.chat.completions.create(
            model=MODEL, messages=messages, response_model=Move, max_tokens=400, max_retries=2
        )
        assert move.way in ("left", "right")
