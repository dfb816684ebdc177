# packages: guidellm
import sys
from pathlib import Path

from _features import DIRECTORY, MODEL, URL, feature, run_command

with feature("benchmark"):
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={URL.removesuffix('/v1')},model={MODEL}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={DIRECTORY}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"]
    command += ["--output", "kind=json,path=benchmarks.json"]
    run_command(command)
    assert list(Path().glob("benchmark*.json"))
