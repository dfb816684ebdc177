"""Try other people's clients against `quintet serve`, each in an environment of its own.

    python scripts/try_clients.py [NAME …] [--model MODEL] [--environments DIR] [--out benchmarks/results/clients.json]

Each program in `scripts/clients/` starts with a comment that names the packages it needs. They are installed into a new
environment that sees the packages of this one, unless the comment says that this one has them; it is deleted after the
program. The program gets the base URL, the model's name and its directory, and prints a line of JSON for each feature
that it tries: its name, and the problem if it does not work. Without a model, a small untrained one is served. A model
whose chat template has no tools gets another template. Exits with status 1 if a feature does not work.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from machine import machine

PROGRAMS = Path(__file__).parent / "clients"
SECONDS = 1200.0
TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ 'For each call: <tool_call>\\n{"name": …, "arguments": …}\\n</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


def packages(program: Path) -> tuple[bool, list[str]]:
    """Return the packages of a program, from the comment in its first line, and whether they are installed for it."""
    line = program.read_text(encoding="utf-8").splitlines()[0]
    place, _, names = line.removeprefix("# packages").partition(":")
    return not place, names.split()


def environment(directory: Path, program: Path) -> Path:
    """Return the interpreter of a new environment with the packages of a program, which sees those of this one."""
    installed, names = packages(program)
    python = directory / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        (own,) = directory.glob("lib/python*/site-packages")
        (own / "outer.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
        if installed:
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *names], check=True)
    return python


def create_model(directory: Path) -> Path:
    """Write a small untrained model whose chat template has tools."""
    from quintet.policies.tiny_models import Preset, build_model, train_tokenizer

    preset = Preset(hidden=64, layers=2, heads=4, kv_heads=2, mlp=128, vocabulary=400, context=4096)
    tokenizer = train_tokenizer(preset.vocabulary, ("a b c d e yes no left right 1 2 3 4",))
    tokenizer.chat_template = TEMPLATE
    model = build_model(preset, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def with_tools(model: Path, directory: Path) -> Path:
    """Return a model whose chat template has tools: itself, or a copy with the template of the untrained model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if "tools" in str(tokenizer.chat_template):
        return model
    shutil.copytree(model, directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """Serve a model; yield the base URL."""
    command = [sys.executable, "-m", "quintet", "serve", str(model), "--port", "0", "--name", "served"]
    with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as server:
        try:
            assert server.stdout is not None
            line = next((line for line in server.stdout if "http://" in line), "")
            match = re.search(r"http://\S+", line)
            if match is None:
                raise SystemExit(f"the server does not start: {log.read_text(encoding='utf-8')[-2000:]}")
            yield match[0]
        finally:
            server.terminate()
            server.wait(60)


def try_client(program: Path, python: Path, url: str, model: Path) -> dict[str, Any]:
    """Run a program; return its packages' versions and its features with their problems."""
    environ = os.environ | {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
    words = [str(python), str(program), url, "served", str(model.resolve())]
    features: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        try:
            done = subprocess.run(words, env=environ, cwd=directory, capture_output=True, text=True, timeout=SECONDS)
            end = "" if done.returncode == 0 else done.stderr[-1500:] or f"ended with status {done.returncode}"
            output = done.stdout
        except subprocess.TimeoutExpired as error:
            end, output = f"not finished after {SECONDS:g} s", str(error.stdout or "")
    for line in output.splitlines():
        if line.startswith('{"feature"'):
            row = json.loads(line)
            features[row["feature"]] = row["problem"]
    if end:
        features["end"] = end
    names = [re.split(r"[\[=<>]", name)[0] for name in packages(program)[1]]
    shown = subprocess.run(
        [str(python), "-c", f"from importlib.metadata import version\nprint(*map(version, {names!r}))"],
        capture_output=True,
        text=True,
    )
    return {"versions": dict(zip(names, shown.stdout.split(), strict=False)), "features": features}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in PROGRAMS.glob("[!_]*.py")))
    parser.add_argument("--model", help="name or directory of the model to serve")
    parser.add_argument("--environments", type=Path, help="directory in which environments are kept and found")
    parser.add_argument("--out", type=Path, help="file of the results; clients that are not tried keep theirs")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out and options.out.exists() else {"clients": {}}
    description = machine()
    with tempfile.TemporaryDirectory() as directory:
        if options.model:
            from quintet.cli.model_downloads import downloaded_model

            original, label = Path(downloaded_model(options.model)), Path(options.model).name
            model = with_tools(original, Path(directory) / label)
            label += "" if model == original else ", another chat template"
        else:
            model, label = create_model(Path(directory) / "untrained"), "untrained"
        with served(model, Path(directory) / "server.log") as url:
            for name in options.names:
                program = PROGRAMS / f"{name}.py"
                with tempfile.TemporaryDirectory() as own:
                    python = environment((options.environments or Path(own)) / name, program)
                    result = try_client(program, python, url, model)
                results["clients"][name] = {"model": label, "machine": description, **result}
                problems = {feature: text for feature, text in result["features"].items() if text}
                print(name, f"{len(result['features']) - len(problems)} of {len(result['features'])}", problems or "")
                if options.out:
                    options.out.write_text(json.dumps(results, indent=1) + "\n")
    tried = [results["clients"][name]["features"] for name in options.names]
    sys.exit(any(problem for features in tried for problem in features.values()))


if __name__ == "__main__":
    main()
