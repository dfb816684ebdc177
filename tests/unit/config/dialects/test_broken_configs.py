"""If these fail, somebody's broken file ends in a traceback, hangs, fills the memory, or reads what nobody named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from foreign import read_merged

from quintet.config.dialects.composition.foreign_config import MergedConfig, compose_config
from quintet.config.dialects.loader import convert
from quintet.config.dialects.registry import DIALECTS, detect
from quintet.errors import ConfigError, MachineError, UserError

SOON = 8.0
"""Seconds; the slowest takes one."""


def given(tmp_path: Path, text: str, *words: str, **files: str | bytes) -> MergedConfig:
    """What `main.yaml` with that text says; `env__lake` is another file, `env/lake.yaml`."""
    for name, content in {"main": text, **files}.items():
        path = tmp_path / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_merged(tmp_path / "main.yaml", words)


def refusal(tmp_path: Path, text: str, *words: str, **files: str | bytes) -> str:
    begun = time.monotonic()
    with pytest.raises(UserError) as error:
        given(tmp_path, text, *words, **files).value("a")
    assert time.monotonic() - begun < SOON
    assert error.value.exit_status == 2
    assert error.value.hint
    return str(error.value)


LEADS = "defaults:\n  - x\n  - _self_\n"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("q: &a [*a]\n", "x.yaml:1: the alias *a stands inside of its anchor"),
        ("q: 1\nq: 2\n", "q is set twice"),
        ("q:\n\t- 1\n", "x.yaml:2 is not YAML"),
        (b"q: \xe4\n", "x.yaml:1 is not UTF-8"),
        ("q: !!python/object/apply:os.system [echo]\n", "x.yaml:1: cannot read the tag"),
        ("q: !!set {a}\n", "x.yaml:1: cannot read the tag"),
        ("- 1\n", "x.yaml has no keys"),
        ("q: " + "[" * 5000 + "]" * 5000, "x.yaml:1 is nested too deeply"),
        ("q: ${\n", "q ("),
        ("a.b: 1\n", "a file has its keys in sections"),
        ("hydra: 5\n", "hydra = 5"),
        ("# @package a b c\nq: 1\n", "Too many components"),
        ("q: 1\n" * 70_000, "bytes"),
        ("defaults: [x]\n", "in a circle"),
        ("defaults: {a: b}\n", "must be a list"),
        ("defaults: [1]\n", "Unsupported type in defaults"),
        ("defaults: [{}]\n", "Missing group name"),
    ],
)
def test_every_file_of_a_defaults_list_is_checked_before_it_is_composed(
    content: str | bytes, part: str, tmp_path: Path
) -> None:
    assert part in refusal(tmp_path, LEADS, x=content)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "defaults: [xx]\n",
            ["main.yaml:1: its defaults list names xx, but xx.yaml does not exist", "did you mean x?"],
        ),
        ("defaults:\n- env: lak\n", ["its defaults list names env/lak", "did you mean env/lake?"]),
        ("defaults:\n- env: nothing\n", ["its defaults list names env/nothing", "there are env/lake, env/room"]),
        ("defaults: [nowhere/at/all]\n", ["looked in", "hydra.searchpath"]),
        ("defaults: [bad]\n", ["bad.yaml:1: its defaults list names nobody"]),
        ("defaults: [../x]\n", ["outside the directories that were named", "hydra.searchpath: [file://"]),
        ("defaults: [//etc/x]\n", ["names /etc/x, outside"]),
        ("defaults: [/etc/passwd]\n", ["its defaults list names etc/passwd"]),
        ("defaults: [{env: ../../x}]\n", ["outside"]),
        ("hydra: {searchpath: ['pkg://os']}\n", ["main.yaml:1: hydra.searchpath = 'pkg://os'", "file://DIRECTORY"]),
        ("hydra: {searchpath: ['http://x']}\n", ["only directories are searched"]),
        ("hydra: {searchpath: ['${oc.env:NOPE,\"pkg://os\"}']}\n", ["only directories are searched"]),
        ("hydra:\n  searchpath: ['file://${oc.env:SURELY_NOT_SET}']\n", ["main.yaml:2", "SURELY_NOT_SET", "set it"]),
        ("hydra: {searchpath: file://x}\n", ["must be a list"]),
    ],
)
def test_files_that_arent_there_or_lie_outside_are_named(text: str, parts: list[str], tmp_path: Path) -> None:
    files = {"x": "", "env__lake": "", "env__room": "", "bad": "defaults: [nobody]\n"}
    message = refusal(tmp_path, text, **files)
    assert all(part in message for part in parts), message


def test_a_directory_on_the_search_path_was_named(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more/x.yaml").write_text("a: 3\n")
    (tmp_path / "run").mkdir()
    main = tmp_path / "run/main.yaml"
    main.write_text(f"defaults: [../more/x@_global_]\nhydra: {{searchpath: ['file://{tmp_path}/more']}}\n")
    assert read_merged(main).value("a") == 3


@pytest.mark.parametrize(("folder", "main"), [("config", "mine/main.yaml"), ("config", "config/math/main.yaml")])
def test_what_a_folder_called_config_holds_is_shared(folder: str, main: str, tmp_path: Path) -> None:
    """As ROLL's and RLinf's own examples have it: `../config/traj_envs`, `../hybrid_engines/fsdp`."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "shared.yaml").write_text("a: 3\n")
    path = tmp_path / main
    path.parent.mkdir(exist_ok=True, parents=True)
    name = "../config/shared" if main.startswith("mine") else "../shared"
    path.write_text(f"defaults: ['{name}@_here_']\n")
    written = read_merged(path)
    assert written.value("a") == 3
    assert written.sources["a"] == f"{tmp_path}/config/shared.yaml:1"


def test_a_section_that_is_null_has_no_keys(tmp_path: Path) -> None:
    (tmp_path / "main.yaml").write_text("s: ~\nt:\n")
    written = read_merged(tmp_path / "main.yaml", [], {"s": {"x": 1}, "t": {"y": {"z": 2}}})
    assert written.value("s.x") == 1
    assert written.value("t.y.z") == 2


def test_a_list_in_the_place_of_a_section_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "main.yaml").write_text("s:\n  t: [1]\n")
    with pytest.raises(ConfigError, match=r"s\.t = \[1\] \(.*main\.yaml:2\): must be a section"):
        read_merged(tmp_path / "main.yaml", [], {"s": {"t": {"x": 1}}})


def test_a_name_with_dots_in_it_is_no_traceback(tmp_path: Path) -> None:
    assert given(tmp_path, "a: 1\nvocabulary: {'.': empty, '${x}': 2, '': 3}\n").value("a") == 1


def test_defaults_lists_that_double_end_soon(tmp_path: Path) -> None:
    files = {f"f{n}": f"defaults: [f{n + 1}@p, f{n + 1}@q]\n" for n in range(25)} | {"f25": "a: 1\n"}
    assert "more than 1000 files" in refusal(tmp_path, "defaults: [f0]\n", **files)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: ${a}\n", "cannot be interpolated"),
        ("a: ${b}\nb: ${c}\nc: ${a}\n", "cannot be interpolated"),
        ("a: {x: '${a}'}\n", "cannot be interpolated"),
        ("a: ${oc.env:SURELY_NOT_SET}\n", "SURELY_NOT_SET' not found\n  set it"),
        ("a: ${foo:1}\n", "Unsupported interpolation type foo\n  there are multiply, int_div"),
        ('a: ${multiply:"ab",99999999999}\n', "'ab' is not a number"),
        ("a: ${int_div:1,0}\n", "cannot be interpolated"),
        ("a: ${b\n", "main.yaml:1): its ${…} cannot be parsed"),
        (f"a: '{'${' * 3000}b{'}' * 3000}'\n", "nested too deeply"),
        (f"a: '{'${b}' * 900}'\nb: 1\n", "its ${…} is"),
        ("".join(f"k{n}: '${{k{n}0}}'\n" * (n > 0) for n in range(9)) + "a: ${none}\n", "Interpolation key 'none'"),
        (
            "a: ${k0}\n" + "".join(f"k{n}: '${{k{n + 1}}}${{k{n + 1}}}'\n" for n in range(40)) + "k40: x\n",
            "characters after interpolation",
        ),
        (
            "a: ${k0}\n" + "".join(f"k{n}: ['${{k{n + 1}}}', '${{k{n + 1}}}']\n" for n in range(40)) + "k40: x\n",
            "characters after",
        ),
        (
            "a: ${k0.x}\n"
            + "".join(f"k{n}: {{x: '${{k{n + 1}}}', y: '${{.x}}'}}\n" for n in range(40))
            + "k40: {x: 1}\n",
            "characters after interpolation",
        ),
        ("a: ${k0}\n" + "".join(f"k{n}: ${{k{n + 1}}}\n" for n in range(900)) + "k900: 1\n", "follows from more than"),
    ],
)
def test_interpolations_that_lead_nowhere_or_too_far_are_messages(text: str, part: str, tmp_path: Path) -> None:
    assert part in refusal(tmp_path, text)


def test_what_nobody_reads_may_dangle(tmp_path: Path) -> None:
    written = given(tmp_path, "a: 1\nb: ${nowhere}\nc: ${oc.env:SURELY_NOT_SET}\nd: ${foo:1}\n${e}: ${f}\n")
    assert written.value("a") == 1


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("~nope", ["~nope (command line): there is no such key", "leave it out"]),
        ("~s.xx", ["did you mean ~s.x?"]),
        ("~t=other", ["~t=other (command line): there is no such key"]),
        ("l.0=5", ["l is a list", "set the entire list: l=[…]"]),
        ("a=1,2", ["names several values", "a=[…]"]),
        ("a=range(1,1000000000)", ["names several values"]),
        ("a=choice(1,2)", ["names several values"]),
        ("a=int(1e400)", ["cannot parse the override"]),
        (f"a={'9' * 5000}", ["no number has that many digits"]),
        (f"a={'[' * 30}", ["nested too deeply"]),
        (f"a={'x' * 30_000}", ["too long"]),
        (f"a=[{'1,' * 9000}1]", ["too long"]),
        ("a=[1", ["cannot parse the override 'a=[1' (command line)", "needs quotes"]),
        ("a=é", ["needs quotes: a='\"…\"'"]),
        ("a=x=y", ["needs quotes"]),
        ("a=${", ["cannot parse the override"]),
        ("a b=1", ["write key=value"]),
        ("--a=1", ["write key=value"]),
        ("=3", ["names no key"]),
        ("~", ["names no key"]),
        ("a", ["write key=value"]),
        ("env=roo", ["did you mean env/room?"]),
        ("env@k=room", ["env@k=room (command line)"]),
        ("a@b=1", ["a choice among files is written GROUP=NAME"]),
        ("hydra.searchpath=[pkg://os]", ["command line: hydra.searchpath = 'pkg://os'"]),
    ],
)
def test_overrides_that_cant_be_followed_are_named(word: str, parts: list[str], tmp_path: Path) -> None:
    main = "defaults: [{env: lake}, _self_]\na: 1\ns: {x: 1}\nl: [1, 2]\nt: text\n"
    message = refusal(tmp_path, main, word, env__lake="k: 1\n", env__room="k: 2\n")
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("a=", ""),
        ("a=''", ""),
        ("a=null", None),
        ("a=[]", []),
        ("a=['b c',\"d\",e,1,1e-4,true,null]", ["b c", "d", "e", 1, 1e-4, True, None]),
        ("a={b: {c: [1]}}", {"b": {"c": [1]}}),
        ("a='[1,2]'", "[1,2]"),
        ("a='1,2'", "1,2"),
        ("a=two words", "two words"),
        ("a=http://x:5/y", "http://x:5/y"),
        ("a=$HOME/x", "$HOME/x"),
        ("a=${t}", "text"),
        ("a.b=1", {"b": 1}),
        ("++a=2", 2),
        ("hydra.verbose=true", 1),
        ("hydra/launcher=ray", 1),
    ],
)
def test_values_of_overrides_are_those_of_hydra(word: str, value: object, tmp_path: Path) -> None:
    assert given(tmp_path, "a: 1\nt: text\n", word).value("a") == value


def test_a_section_of_an_override_is_laid_over_that_of_the_file(tmp_path: Path) -> None:
    written = given(tmp_path, "s:\n  x: 1\n  y: {z: 2}\n", "s={x: 5, y: {q: 1}}", "~s.y.z")
    assert written.value("s") == {"x": 5, "y": {"q": 1}}
    assert written.sources["s.x"] == "command line"
    assert "s.y.z" not in written.sources
    kept = given(tmp_path, "s:\n  x: 1\n  y: {z: 2}\n", "s={x: 5}")
    assert kept.sources["s.y.z"].endswith("main.yaml:3")


def test_choices_among_files_are_no_keys(tmp_path: Path) -> None:
    main = "defaults: [env@env.train: lake, _self_]\na: 1\n"
    written = given(tmp_path, main, "env@env.train=room", env__lake="k: 1\n", env__room="k: 2\n")
    assert written.value("env.train.k") == 2
    assert set(written.sources) == {"a", "env.train.k"}


@pytest.mark.parametrize("name", ["main.yml", "main.conf", "main", "my run@2, x=3.yaml"])
def test_a_primary_file_may_be_called_anything(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a: 1\n")
    written = read_merged(tmp_path / name)
    assert written.value("a") == 1
    assert written.sources["a"] == f"{tmp_path}/{name}:1"


def test_defaults_of_the_frameworks_load(tmp_path: Path) -> None:
    """Packages, Hydra's own groups, a primary file without `_self_`, and files that come with a framework."""
    text = """\
defaults:
  - env/lake@env.train
  - ppo_megatron_trainer
  - override hydra/job_logging: stdout
  - override hydra/launcher: ray
hydra:
  searchpath: ["pkg://verl.trainer.config", "file:///nowhere/at/all"]
  job: {env_copy: [SURELY_NOT_SET]}
env: {train: {size: 4}}
"""
    written = given(tmp_path, text, env__lake="size: 3\nkind: lake\n")
    assert written.value("env.train") == {"size": 4, "kind": "lake"}
    assert written.value("model_engine") == "megatron"


def test_what_isnt_a_file_isnt_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(MachineError, match="is not a file"):
            read_merged(path)


def test_variables_of_a_script_are_found_before_those_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_VARIABLE", "machine")
    path = tmp_path / "main.yaml"
    path.write_text("a: ${oc.env:A_VARIABLE}\n")
    assert compose_config(path, [], (), {"A_VARIABLE": "script"}).merge_onto({}).value("a") == "script"
    assert compose_config(path, []).merge_onto({}).value("a") == "machine"


EIGHT = {
    "ragen": ("training.train_batch_size", "rl_or_sft: rl\n"),
    "verl": ("data.train_batch_size", "actor_rollout_ref: {}\n"),
    "vagen": ("data.train_batch_size", "rollout_manager: {max_turns: 2}\n"),
    "rlinf": ("data.rollout_batch_size", "cluster: {num_nodes: 1}\n"),
    "roll": ("rollout_batch_size", "actor_train: {infer_batch_size: 1}\n"),
}


@pytest.mark.parametrize("dialect", EIGHT)
def test_a_word_for_a_number_is_a_type_error_in_every_dialect(dialect: str, tmp_path: Path) -> None:
    key, rest = EIGHT[dialect]
    path = tmp_path / "main.yaml"
    path.write_text(rest)
    with pytest.raises(ConfigError) as error:
        convert(compose_config(path, [f"{key}=eight"]), DIALECTS[dialect])
    assert f"{key} = 'eight' (command line): must be an integer" in str(error.value)


@pytest.mark.parametrize("dialect", EIGHT)
def test_a_typo_is_one_with_a_plus_and_a_key_that_is_new_waits(dialect: str, tmp_path: Path) -> None:
    key, rest = EIGHT[dialect]
    path = tmp_path / "main.yaml"
    path.write_text(rest)
    with pytest.raises(ConfigError) as error:
        convert(compose_config(path, [f"+{key}s=1", "+newkey=1"]), DIALECTS[dialect], to_run=True)
    assert f"unknown key {key}s (command line) looks like a typo; did you mean {key}?" in str(error.value)
    assert "newkey = 1 (command line) waits: key of a fork" in str(error.value)


def test_a_native_file_is_nobody_elses(tmp_path: Path) -> None:
    """The sections that a run's own `config.yaml` has are no marks of a dialect."""
    import yaml

    from quintet.config.compose import load_experiment
    from quintet.config.schema import keys
    from quintet.config.yaml_writer import dump_config

    assert detect(yaml.safe_load(dump_config(load_experiment(None)))) == []
    native = {key.name for key in keys()}
    assert not [mark for dialect in DIALECTS.values() for mark in dialect.marks if mark in native]


@pytest.mark.parametrize("name", ["linked/secret", "secret"])
def test_a_link_in_a_directory_of_configurations_does_not_read_files_elsewhere(tmp_path: Path, name: str) -> None:
    """Links to files beside the directory are followed: RAGEN links the file of a submodule."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/secret.yaml").write_text("trainer: {project_name: the-secret}\n")
    directory = tmp_path / "repository/config"
    directory.mkdir(parents=True)
    (directory / "linked").symlink_to(tmp_path / "elsewhere")
    (directory / "secret.yaml").symlink_to(tmp_path / "elsewhere/secret.yaml")
    (directory / "run.yaml").write_text(f"defaults: [{name}, _self_]\n")
    with pytest.raises(ConfigError) as error:
        read_merged(directory / "run.yaml", ())
    assert "outside the directories that were named" in str(error.value)
    assert "the-secret" not in str(error.value)


@pytest.mark.attack
@pytest.mark.parametrize(
    "condition",
    [
        f"[[ {'a' * 60}! =~ ^(a+)+$ ]]",
        f"[[ {'a' * 2000}! == {'*a' * 9}b ]]",
        f"[[ -n ${{X%%{'*a' * 9}b}} ]]",
        f"[[ -n ${{X//{'*a' * 9}b/c}} ]]",
    ],
)
def test_a_pattern_of_a_script_is_matched_in_bounded_time(tmp_path: Path, condition: str) -> None:
    script = tmp_path / "run.sh"
    start = "python3 -m verl.trainer.main_ppo data.train_batch_size=$BS"
    script.write_text(f"X={'a' * 2000}\nBS=1\n{condition} && BS=2\n{start}\n")
    code = "import sys; from quintet.config.dialects.scripts.run_script_reader import read_run_script as read; "
    code += "from pathlib import Path; read(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(script)], timeout=30, check=True)
