# packages: dspy
import dspy
from _features import MODEL, URL, feature

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=URL, api_key="none", max_tokens=64, cache=False))
with feature("call"):
    assert dspy.settings.lm("left or right?")
