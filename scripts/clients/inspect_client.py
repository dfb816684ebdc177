# packages: inspect-ai
import os

import inspect_ai
from _features import MODEL, URL, feature
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def move():
    async def execute(way: str) -> str:
        """Move left or right.

        Args:
            way: Left or right.
        """
        return "done"

    return execute


os.environ["OPENAI_BASE_URL"] = URL
samples = [Sample(input="left or right?", target="left") for _ in range(4)]
options = {"model": f"openai-api/openai/{MODEL}", "max_tokens": 16, "display": "none", "log_dir": "logs"}
for name, solver in (("text", [generate()]), ("tools", [use_tools(move()), generate()])):
    with feature(name):
        (log,) = inspect_ai.eval(Task(dataset=samples, solver=solver, scorer=includes()), message_limit=6, **options)
        assert log.status == "success", log.error
