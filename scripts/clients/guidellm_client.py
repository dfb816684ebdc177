# packages: guidellm
import subprocess
import sys
from pathlib import Path

from _features import DIRECTORY, MODEL, URL, feature

with feature("benchmark"):
    command = [str(Path(sys.executable).with_name("guidellm")), "benchmark", "run", "--target", URL.removesuffix("/v1")]
    command += [
        "--model",
        MODEL,
        "--processor",
        DIRECTORY,
        "--profile",
        "concurrent",
        "--rate",
        "2",
        "--max-requests",
        "4",
    ]
    command += ["--data", "prompt_tokens=32,output_tokens=8", "--output-dir", "."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-500:]
    assert list(Path().glob("benchmark*.json"))
