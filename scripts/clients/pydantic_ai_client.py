# packages: pydantic-ai-slim[openai]
from _features import MODEL, URL, feature
from pydantic_ai import Agent, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
settings = {"max_tokens": 16, "seed": 1}
with feature("run"):
    assert Agent(model).run_sync("left or right?", model_settings=settings).usage
with feature("tool_plain"):
    agent = Agent(model)

    @agent.tool_plain
    def move(way: str) -> str:
        """Move left or right."""
        return "done"

    try:
        agent.run_sync("left or right?", model_settings=settings)
    except UnexpectedModelBehavior:
        pass  # an untrained model answers nothing that counts
