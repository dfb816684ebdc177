"""An engine behind OpenAI's HTTP protocol, for programs that play and are trained on."""
