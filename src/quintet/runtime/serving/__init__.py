"""OpenAI-compatible server in front of an engine, for external agents whose episodes are trained on."""
