"""If these fail, `quintet serve` can't be started, asked or stopped, or its page shows commands that don't work."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_processes

from quintet.policies.tiny_models import Preset, build_model, train_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
Serve = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = tmp_path / "models" / "mine"
    shape = Preset(hidden=32, layers=1, heads=4, kv_heads=2, mlp=64, vocabulary=300, context=2048)
    tokenizer = train_tokenizer(shape.vocabulary, ["Walk to the goal. Down Up Left Right"])
    build_model(shape, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=3).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture
def serve(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start `quintet serve …`; ended with the test, however that ends."""
    monkeypatch.delenv("QUINTET_TOKEN", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = warm_processes.Popen(
            [sys.executable, "-m", "quintet", "serve", *arguments],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str], name: str = "mine") -> str:
    """Where it says it can be asked."""
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.fullmatch(rf"{name} on (http://127\.0\.0\.1:\d+)/v1\n", line)
    assert match, (line, process.communicate()[1])
    return match[1]


def ask(url: str, body: Any = None, token: str | None = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    sent = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, sent, headers), timeout=60) as response:
        return json.loads(response.read())


def ended(process: subprocess.Popen[str], asked_to_stop: signal.Signals) -> None:
    process.send_signal(asked_to_stop)
    _, output = process.communicate(timeout=60)
    assert process.returncode == 128 + asked_to_stop, output
    assert f"stopped ({asked_to_stop.name})" in output
    assert "Traceback" not in output


def test_it_serves_those_who_know_the_token_until_it_is_told_to_stop(serve: Serve) -> None:
    overrides = ["--name", "it", "--context", "128", "training.threads=1"]
    process = serve("models/mine", "--port", "0", *overrides, QUINTET_TOKEN="sesame")
    url = url_of(process, "it")
    assert ask(f"{url}/health") == {"status": "ok"}
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(f"{url}/v1/models")
    assert ask(f"{url}/v1/models", token="sesame")["data"][0]["max_model_len"] == 128
    body = {"prompt": "Walk", "seed": 5, "return_token_ids": True}
    results = [ask(f"{url}/v1/completions", body, "sesame")["choices"][0]["token_ids"] for _ in range(2)]
    assert results[0] == results[1]
    ended(process, signal.SIGINT)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_pages_commands_do_what_it_says(serve: Serve, tmp_path: Path) -> None:
    """All of them one after another, at another port; the first one serves the others."""
    rows = [{"prompt": f"{n} + 1", "data_source": "openai/gsm8k", "answer": str(n + 1)} for n in range(5)]
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (first, *commands), (python,) = blocks("bash"), blocks("python")
    tokens = first.replace("8000", str(port)).split()
    assert tokens[:2] == ["quintet", "serve"]
    process = serve(*tokens[2:])
    assert url_of(process).endswith(str(port))
    quintet = f'quintet() {{ {sys.executable} -m quintet "$@"; }}\n'
    output = ""
    for command in commands:
        script = quintet + command.replace("8000", str(port)).replace("curl ", "curl --fail-with-body ")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        output += done.stdout
    assert len(commands) >= 4
    assert '"logprobs"' in output
    assert '"prompt_token_ids"' in output
    assert '"sessions": {"episode-1": 1}' in output
    assert json.loads((tmp_path / "runs/eval-mine-frozenlake/results.json").read_text())["answers"] == 8
    assert json.loads((tmp_path / "runs/sums/results.json").read_text())["answers"] == 4
    done = subprocess.run([sys.executable, "-c", python], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" 1.0\n")
    ended(process, signal.SIGTERM)
