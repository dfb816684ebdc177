"""If these fail, a run script says something else to Quintet than to its framework, or is run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from quintet.config.capabilities import Capability
from quintet.config.dialects.composition.foreign_config import compose_config
from quintet.config.dialects.scripts.compound_commands import read_commands
from quintet.config.dialects.scripts.run_script import RunScript
from quintet.config.dialects.scripts.run_script_reader import read_run_script
from quintet.config.dialects.scripts.variables import Variables
from quintet.errors import ConfigError, MachineError, UnsupportedRunError

VERL = r"""#!/bin/bash
set -x
# a comment
export VLLM_ATTENTION_BACKEND=XFORMERS
files="['$HOME/a.parquet', '$HOME/b.parquet']"
N=$((2*8))

PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo --config-path=config \
    --config-name='ppo_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    data.train_files="$files" \
    data.train_batch_size=$N \
    +trainer.extra=1 \
    trainer.logger='["console","wandb"]' \
    trainer.default_local_dir=$HOME/runs/${NAME:-mine} $@ 2>&1 | tee run.log
"""


def read(tmp_path: Path, text: str, name: str = "run.sh", **environment: str) -> RunScript:
    (tmp_path / name).write_text(text)
    return read_run_script(tmp_path / name, {"HOME": "/home/me", **environment})


def refusal(tmp_path: Path, text: str, name: str = "run.sh", overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text, name).with_overrides(overrides)
    assert error.value.exit_status == 2
    return str(error.value)


def command(words: str, before: str = "") -> str:
    return f"{before}\npython -m verl.trainer.main_ppo {words}\n"


def test_a_script_is_read_word_by_word_with_its_lines(tmp_path: Path) -> None:
    found = read(tmp_path, VERL)
    assert found.dialect == "verl"
    assert found.config is None
    assert found.words == (
        "algorithm.adv_estimator=grpo",
        "data.train_files=['/home/me/a.parquet', '/home/me/b.parquet']",
        "data.train_batch_size=16",
        "+trainer.extra=1",
        'trainer.logger=["console","wandb"]',
        "trainer.default_local_dir=/home/me/runs/mine",
    )
    assert [place.rpartition(":")[2] for place in found.places] == ["10", "11", "12", "13", "14", "15"]
    assert found.environment["VLLM_ATTENTION_BACKEND"] == "XFORMERS"
    assert "files" not in found.environment


def test_its_words_are_composed_with_their_places_and_those_of_the_command_line_win(tmp_path: Path) -> None:
    found = read(tmp_path, VERL)
    given = compose_config(found.config, found.with_overrides(["data.train_batch_size=4"]), found.places)
    assert given.tree.data.train_batch_size == 4
    assert given.sources["data.train_batch_size"] == "command line"
    assert given.sources["algorithm.adv_estimator"] == f"{tmp_path}/run.sh:10"
    assert given.tree.trainer.logger == ["console", "wandb"]


def test_nothing_of_it_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = command(f"a=$(tee {mark}) b=`tee {mark}` c=<(touch {mark})", f"touch {mark}\nX=$(touch {mark})")
    assert [value.key for value in read(tmp_path, text).missing] == ["a", "b", "c"]
    read(
        tmp_path,
        command("data.seed=1", f"touch {mark}; trap 'touch {mark}' EXIT; eval touch {mark}; : $(touch {mark})"),
    )
    assert not mark.exists()


def test_a_name_may_have_the_time(tmp_path: Path) -> None:
    (name,) = read(tmp_path, command("trainer.experiment_name=run_$(date +%Y%m%d_%H%M)")).words
    assert re.fullmatch(r"trainer.experiment_name=run_20\d{6}_\d{4}", name)


SNIPPETS = {
    "quotes": """python3 -m M a.b='x y' c="it's" d=\\"e\\" f=a\\ b 'g=h' "i=j"k l='' m="" n=1""",
    "variables": """A=1; B="two words"; unset C
python3 -m M a=$A b="$B" c=${B} d='$A' e="\\$A" ${C} f=$A$A "g=${A}x" """,
    "defaults": """unset X; Y=
python3 -m M a=${X:-d} b=${Y:-d} c=${Y-d} d=${X-"q r"} e=${X:-"q r" s} "f=${X:-a b}" g=${A:-${Y:-z}}""",
    "alternatives": """A=1; unset B; python3 -m M a=${A:+yes} b=x${B:+no} c=${A+"y z"}""",
    "replacing": """P=/a/b/c.tar.gz
python3 -m M ${P//a/x}""",
    "lower case": """M=Qwen/Qwen2; python3 -m M a=${M,,}""",
    "arithmetic": """n=3; m=$((n*2))
python3 -m M a=$((m + 2*(n-1))) b=$((7/2)) c=$(((n-1)*2)) e=$(( (1+2) * $m ))""",
    "arrays": """A=(a=1
  # inside
  b="two words" 'c=[1,2]'); A+=(d=$((1+1))); E=(); python3 -m M "${A[@]}" "${E[@]}" z=${A[0]} ${A[@]}""",
    "exports": """export A=1 B=2; readonly C=3; declare -x D=4; python3 -m M a=$A b=$B c=$C d=$D""",
    "more": """A=x; A+=y; python3 -m M a=$A""",
    "in order": """A=1; A=2 B=$A; A=3 python3 -m M a=$A b=$B""",
    "splitting": """A="x=1  y=2"; python3 -m M $A "$A" p$A"q" """,
    "continued": """python3 -m M a=1 \\
   b=2 \\
      c="d
e" # comment
""",
    "redirected": """python3 -m M a=1 >/dev/stdout 2>&1 b=2 2>/dev/null | cat &""",
    "heredoc": """cat <<EOF >/dev/null
python3 -m M no=1
EOF
python3 -m M yes=1""",
    "conditions": """A=fast; if [ "$A" = fast ] && [ 3 -gt 2 ]; then B=1; elif true; then B=2; else B=3; fi
if [[ $A == f* ]]; then C=1; fi; if [ -z "$NOPE" ] || [ -n "$A" ]; then D=1; else D=2; fi
if [ $A != fast ]; then python3 -m M no=1; else python3 -m M b=$B c=$C d=$D; fi""",
    "conditions of two": """A=fast; B=; if [[ -n "$A" && -z $B ]]; then C=1; fi
[[ $A == slow || ! -d /nowhere ]] && D=2; [[ $A == f* && $B == x || $A == fast ]] && E=3
[[ $A == x && $NOPE == y ]] || F=4; python3 -m M c=$C d=$D e=$E f=$F""",
    "empty words": """E=; export E; python3 -m M "" a=1 '' b=2; bash inner.sh "" "$E" c=3
f() { python3 -m M $# "$2"x; }; f '' b""",
    "short": """A=; [ -z "$A" ] && A=1; [ "$A" = 2 ] && A=3; [ "$A" = 1 ] || A=4; python3 -m M a=$A""",
    "functions": """run() {
  local x=3
  python3 -m M x=$x
}
run""",
    "loops": """while true; do python3 -m M n=5 && break; done; for n in 1 2; do echo $n; done >/dev/null""",
    "unrolled loops": """A=(x "y z"); for a in 1 2; do for b in "${A[@]}" w$a; do python3 -m M a=$a b="$b"; done; done
for n in {3..1} $(echo 7 8) $(seq 9 10); do [ $n = 2 ] && continue; [ $n = 8 ] && break; python3 -m M n=$n; done
python3 -m M $n""",
    "counting loops": """for ((i=0; i<3; i++)); do python3 -m M i=$i; done
for ((j=9; j>5; j-=2)); do python3 -m M j=$j; done
k=0; while [ $k -lt 2 ]; do python3 -m M k=$k; k=$((k+1)); done; until (( k >= 4 )); do ((k++)); done; python3 -m M $k
for a in 1 2; do for b in 1 2 3; do if (( b == 2 && a != 2 )); then continue 2; fi; python3 -m M $a$b; done; done""",
    "cases in loops": """for m in ppo grpo rloo; do case $m in ppo) a=gae ;; grpo) a=$m ;; *) continue ;; esac
if [[ "$m" == gr* ]]; then extra="k=1"; else extra=""; fi; python3 -m M a=$a $extra; done""",
    "called functions": """run() { local x=$1 y; shift; y="$*"; z=$x; [ "$x" = 2 ] && return
python3 -m M x=$x y="$y" n=$# "$@" ${@:2}; }
x=0; for i in 1 2 3; do run $i "a b" "" c; done; python3 -m M $x $y $z; quiet() { run 4; }; quiet >/dev/stdout""",
    "output of functions": """path() { if [[ "$1" == */* ]]; then echo "$1"; return; fi
case "$1" in Q*) echo "Qwen/$1" ;; *) printf '%s\\n' "other/$1" ;; esac; }
for m in a/b Q1 L; do p=$(path "$m"); python3 -m M p=$p q=$(path $(path $m)); done
none() { echo no >&2; echo hidden >/dev/null; { echo also hidden; } >&2; }; python3 -m M "x$(none)" """,
    "read lines": """for e in "ppo|1 x|" "grpo|2" "a|b|c|d"; do IFS='|' read -r m v w <<< "$e"
python3 -m M "$m" "[$v]" "[$w]"; done
IFS=',' read -ra A <<< "1,2,,3"; python3 -m M "${A[@]}" ${#A[@]}; read a b <<< "  x  y z "; python3 -m M "$a" "[$b]"
IFS=, read -r -a B <<< ""; python3 -m M ${#B[@]}; read -r only <<< " t "; python3 -m M "[$only]"
for e in "1:2:3"; do IFS=: read x y <<< $e; python3 -m M "$x" "$y"; done""",
    "parts of arrays": """A=(a "b c" d e); python3 -m M ${#A[@]} "${A[@]:1:2}" ${!A[@]} "${A[*]}" ${A[$((1+2))]}; i=0
python3 -m M "${A[i]}" "${A[$i]}" "$(IFS=,; echo "${A[*]}")"
for i in "${!A[@]}"; do python3 -m M $i="${A[$i]}"; done""",
    "parts of words": """P=/a/b.tar.gz; S=abc; python3 -m M ${P##*/} ${P#*/} ${P%.*} ${P%%.*}
python3 -m M ${#S} ${S:1} ${S:0:2} ${P/a/x} ${P//\\//_}
V="--steps=5"; python3 -m M "${V#*=}" "${V%%=*}" """,
    "processes": """A=1; (A=2; python3 -m M $A); { A=3; } | cat; B=1; { B=2; } & wait; python3 -m M $A $B
( exit 1 ); f() { exit 0; }; X=$(f; echo no); python3 -m M "[$X]"; exit; python3 -m M no""",
    "options": """STEPS=3; while [ $# -gt 0 ]; do case "$1" in --steps) STEPS="$2"; shift 2 ;; *) exit 1 ;; esac; done
if [[ "$STEPS" =~ ^[0-9]+$ ]] && ! [[ "$STEPS" =~ ^x ]]; then python3 -m M steps=$STEPS; fi""",
    "regular expressions": """for n in 12 1x; do if ! [[ "$n" =~ ^[0-9]+$ ]] || [ "$n" -lt 1 ]; then
python3 -m M no "$n"; fi; done
[[ a =~ b ]] || python3 -m M yes""",
    "cases": """case "$HOME" in /x|"/y z") A=1 ;; (/home/*) A=2 ;; *) A=3; python3 -m M no=1 ;; esac
case b in a|b) B=1 ;; *) B=2; esac
case c in
  a) C=1 ;;  # not this one
  *)
    case "$B" in 1) C=2 ;; *) C=3 ;; esac
    ;;
esac
python3 -m M a=$A b=$B c=$C""",
    "negation": """if ! [ 1 = 2 ] && [ ! -n "" ]; then A=1; fi; ! { false; } && B=2; python3 -m M a=$A b=$B""",
    "paths": """D=$(dirname /a/b/c.sh); N=$(basename /a/b/c.sh .sh); H=$(cd /tmp/.. && pwd); python3 -m M $D $N $H""",
    "filters": """D=/a/b/c/d; N=$(echo $D | rev | cut -d'/' -f1-3 | rev | tr '/' '-'); T=$(echo "a b" | tr -d ' ')
python3 -m M $N $T $(echo x/y/z | cut -f 2- -d /) $(echo plain | cut -d, -f1) $(echo a-b | tr -- '-' '_')""",
    "prompts": """read -p 'port? ' PORT </dev/null; python3 -m M port=${PORT:-5000}""",
    "own words": """python3 -m M a=1 "$@" $@ ${@:2} b=2""",
    "sourced files": """A=1; BS=64; source env.sh; python3 -m M bs=$BS $ONLY_THERE
. ./env.sh x "y z"; python3 -m M $FIRST
[ -f env.sh ] && source env.sh; D=$(dirname "$PWD/x"); . "$D/env.sh"; python3 -m M $BS; greet you; greet me
[ -f nothing.sh ] && source nothing.sh; set -a; . sub/set.sh; set +a; python3 -m M $IN_SUB
f() { source sub/set.sh; return; python3 -m M no; }; f; python3 -m M "$(. env.sh; echo $BS)" """,
    "arithmetic commands": """n=3; let n*=2; let "m = n + 1" k=m-2; let n++; python3 -m M $n $m $k
declare -i x=5+3 y; y=x*2; x+=1; typeset -i z=$n+1
f() { local -i q=4*4; q+=1; python3 -m M q=$q; }; f
python3 -m M $x $y $z; (( a = 2, b = a + 1 )); ((++a)); python3 -m M $a $b; let a-3 || python3 -m M zero
declare -i neg=-1; python3 -m M $neg; unset neg; neg=1+1; python3 -m M $neg""",
    "evaluated words": """A=1; N=A; eval "A=5; B='x y'"; eval "$N=7"; python3 -m M $A "$B"
C='python3 -m M c=1'; eval $C d=2
eval "f() { python3 -m M in=$A; }"; f; eval 'for n in 1 2; do python3 -m M n=$n; done'
g() { eval "return 0"; python3 -m M no; }; g; for n in 1 2; do eval 'continue'; python3 -m M no; done""",
    "inner scripts": """A=1; export E=2; bash inner.sh "x y" 3; MODEL=q bash inner.sh
/bin/bash -e -u ./inner.sh $A; python3 -m M $A $E $MODEL
for n in 1 2; do bash inner.sh $n; done; env MODEL=w bash -x inner.sh A=no; (exec bash inner.sh last); set -a; A=4
bash inner.sh; exec bash inner.sh end; python3 -m M no""",
    "crlf": "A=1\r\npython3 -m M \\\r\n a=$A\r\n",
}


FILES = {
    "env.sh": """BS=128
export ONLY_THERE="o=1"
FIRST="$1 $2 $#"
greet() {
  python3 -m M hello=$1
}
return 0
BS=1
""",
    "sub/set.sh": "IN_SUB=yes\n",
    "inner.sh": """E=${E}0
python3 -m M in "a=${A:-none}" e=$E m=${MODEL:-no} n=$# "$@"
[ "$1" = last ] && exit 3
A=inner
""",
}
"""Files beside the script of each snippet."""


@pytest.mark.parametrize("name", SNIPPETS)
def test_words_are_those_that_a_shell_gives(name: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash to compare with")
    text = SNIPPETS[name].replace("\r\n", "\n")
    for file, content in FILES.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    stub = "python3() { shift 2; printf '%s\\0' \"$@\"; }; export -f python3\n"
    done = subprocess.run(
        [bash, "--norc", "-c", stub + text], capture_output=True, check=False, env={"HOME": "/home/me"}, cwd=tmp_path
    )
    expected = done.stdout.decode().split("\0")[:-1]
    variables = Variables(tmp_path / "run.sh", {"HOME": "/home/me", "PWD": str(tmp_path)})
    commands = [command.words for command in read_commands(SNIPPETS[name], variables).commands]
    found = [word.text for words in commands if words[0].text == "python3" for word in words[3:]]
    assert found == expected


@pytest.mark.parametrize(
    ("before", "word", "parts"),
    [
        ("NOW=$(date +%s)", "data.seed=$NOW", ["data.seed", "$(date +%s)", "line 1"]),
        ("X=`hostname`", "data.tokenizer=$X", ["`hostname` is the output of a program"]),
        ("D=$1", "data.train_files=$D", ["$1 is given where the script or the function is called"]),
        ("", "data.train_files=$NOWHERE/x", ["$NOWHERE is set neither in the script nor in the environment"]),
        ("read -p 'port? ' PORT", "data.seed=$PORT", ["$PORT is read while the script runs"]),
        ("X=$(echo a/b | sort | tr / -)", "data.seed=$X", ["$(echo a/b | sort | tr / -) is the output of a program"]),
        ("X=$(echo a; rev)", "data.seed=$X", ["is the output of a program"]),
        ("if grep -q x /proc/cpuinfo; then N=1; else N=2; fi", "data.seed=$N", ["depends on the condition at line 1"]),
        ("case $A in x) N=1 ;; *) N=2 ;; esac", "data.seed=$N", ["$N depends on the `case` at line 1"]),
        ("while grep -q x y; do N=1; done", "data.seed=$N", ["$N depends on the `while` at line 1"]),
        ("f() { grep -q x y && return; N=1; }; f", "data.seed=$N", ["$N may be set by f"]),
        ("f() { N=$1; }; f $(x)", "data.seed=$N", ["$(x) is the output of a program"]),
        ("for n in $(x); do N=1; done", "data.seed=$N", ["depends on the `for` at line 1", "where $(x) is the output"]),
        ("for n in 1 2; do grep -q x y && break; N=$n; done", "data.seed=$N", ["$N depends on the `for` at line 1"]),
        (
            "for ((i=0; i<N; i++)); do M=$i; done",
            "data.seed=$M",
            ["depends on the `for` at line 1", "$N is set neither"],
        ),
        ("N=1; while true; do N=2$N; done", "data.seed=$N", ["$N depends on the `while` at line 1"]),
        ("A=(1 2); N=${A[$(x)]}", "data.seed=$N", ["$(x) is the output of a program"]),
        ("grep -q x /proc/cpuinfo && N=1", "data.seed=$N", ["is set on a condition that is not known"]),
        ("N=$((RANDOM))", "data.seed=$N", ["$RANDOM is set by bash itself"]),
        *(
            ("A=1", f"data.seed={construct}", [f"{construct} can only be evaluated by a shell"])
            for construct in (
                "${A@Q}",
                "${!A*}",
                "${A/?(x)/2}",
                "$$",
                "$'\\u31'",
            )
        ),
    ],
)
def test_what_only_a_shell_could_tell_is_named_unless_the_command_line_says_it(
    before: str, word: str, parts: list[str], tmp_path: Path
) -> None:
    text = f"{before}\npython -m verl.trainer.main_ppo {word} data.shuffle=true\n"
    message = refusal(tmp_path, text)
    key = word.partition("=")[0]
    for part in (*parts, f"{key} ({tmp_path}/run.sh:2)", f"set it on the command line: {key}=…"):
        assert part in message, message
    assert read(tmp_path, text).with_overrides([f"++{key}=7"]) == ["data.shuffle=true", f"++{key}=7"]


def test_unused_unknowns_are_nobodys_fault(tmp_path: Path) -> None:
    before = "NOW=$(date)\nsource env.sh\nexport PYTHONPATH=$PYTHONPATH:x\n[ -d $NOW ] && Y=1"
    assert read(tmp_path, command("data.seed=1", before)).with_overrides([]) == ["data.seed=1"]


def test_the_environment_fills_what_the_script_leaves(tmp_path: Path) -> None:
    text = command("data.seed=$SEED trainer.nnodes=${NODES:-1} trainer.project_name=$P", "P=own")
    assert read(tmp_path, text, SEED="3", NODES="2", P="outer").words == (
        "data.seed=3",
        "trainer.nnodes=2",
        "trainer.project_name=own",
    )


def test_lines_after_a_comment_between_them_are_lost_as_in_bash_and_said_so(tmp_path: Path) -> None:
    lines = ["python3 -m verl.trainer.main_ppo \\", "  data.seed=1 \\", "  # off: a=2", "  # more"]
    text = "\n".join([*lines, "  data.shuffle=true \\", "", "echo b=1"])
    found = read(tmp_path, text)
    assert found.words == ("data.seed=1",)
    reason = "a shell ends the command at this comment; the overrides up to line 6 are lost"
    assert found.remarks == (f"{tmp_path}/run.sh:3: {reason}",)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (command("a=1") * 2, ["trains 2 times", "run.sh:2  verl.trainer.main_ppo", "run.sh:4  verl"]),
        ("echo python -m verl.trainer.main_ppo\n", ["runs no known trainer"]),
        ("python -m verl.trainer.main_other a=1\n", ["run.sh:1 runs verl.trainer.main_other"]),
        (command("a=1 --foo"), ["run.sh:2: '--foo' is not an override"]),
        (command("a=1 \\ \n  b=2"), ["run.sh:2: a blank after the backslash"]),
        (command("a='1"), ["run.sh:2: the ' that begins here is never closed"]),
        (command('a="1'), ['run.sh:2: the " that begins here is never closed']),
        (command("a=${X"), ["run.sh:2: the ${ that begins here is never closed"]),
        (command("a=$(x"), ["run.sh:2: the $( that begins here is never closed"]),
        ("A=(b\n" + command("a=1"), ["run.sh:1: the ( that begins here is never closed"]),
        (command("a=1", "select n in 1 2; do :; done"), ["run.sh:1: `select` is not supported"]),
        (command("a=1", "if true; fi"), ["run.sh:1: `fi` is not supported"]),
        (command("a=1", "while true; do :"), ["run.sh:1: the while that begins here is never closed"]),
        (command("$A", "A=$(x)"), ["run.sh:2: $(x) is the output of a program", "write it out in the script"]),
        (command("$A", "A=$1"), ["run.sh:2: $1 is given where", "run.sh -- ARGUMENT"]),
        (command("$K=1", "K=$(x)"), ["run.sh:2: $(x) is the output of a program"]),
        (command("--config-name=mine"), ["run.sh:2: there is no ./mine.yaml"]),
        (command("--config-name=$(x)"), ["run.sh:2: $(x) is the output of a program"]),
    ],
)
def test_scripts_that_cant_be_followed_are_one_message(text: str, parts: list[str], tmp_path: Path) -> None:
    message = refusal(tmp_path, text)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("line", "dialect"),
    [
        ("torchrun --standalone --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer optim.lr=1", "verl"),
        ("python3 -m verl.trainer.main_eval data.path=x", "verl"),
        ("python verl/trainer/main_ppo.py a=1", "verl"),
        ("ray job submit --address=x -- python3 -m verl.trainer.main_ppo a=1", "verl"),
        ("python -m vagen.trainer.main_ppo a=1", "vagen"),
        ("python -m vagen.main_ppo a=1", "vagen"),
        ("python -m ragen.train a=1", "ragen"),
        ("CUDA_VISIBLE_DEVICES=0 python3 prepare.py a=1; python -m ragen.train a=1", "ragen"),
        ("run() { python -m ragen.train a=1; }; run", "ragen"),
        ("python examples/start_agentic_pipeline.py a=1", "roll"),
        ("CMD='python x/train_embodied_agent.py a=1'; echo $CMD; $CMD", "rlinf"),
        ('tmux send-keys -t "x" "python3 -m vagen.trainer.main_ppo \\\\\n a=1" C-m', "vagen"),
        ("if true; then python3 -m verl.trainer.main_ppo a=1; fi", "verl"),
    ],
)
def test_trainers_are_known_however_they_are_called(line: str, dialect: str, tmp_path: Path) -> None:
    found = read(tmp_path, f"{line}\n")
    assert found.dialect == dialect
    assert {"a=1", "optim.lr=1", "data.path=x"} & set(found.words)


def test_torchrun_decides_the_devices_of_a_trainer_that_it_starts(tmp_path: Path) -> None:
    options = "--nnodes=${NNODES:-2} --nproc_per_node 4 -m verl_mlite.launch verl.trainer.fsdp_sft_trainer"
    found = read(tmp_path, f"torchrun {options} trainer.n_gpus_per_node=8\n")
    assert found.words == ("trainer.n_gpus_per_node=8", "trainer.nnodes=2", "trainer.n_gpus_per_node=4")
    assert read(tmp_path, "torchrun --nproc_per_node=$1 -m verl.trainer.fsdp_sft_trainer a=1\n").words == ("a=1",)


@pytest.mark.parametrize(
    ("line", "capability"),
    [
        ("python3 -m recipe.prime.main_prime a=1", Capability.RECIPES),
        ("python3 main_ppo_split.py a=1", Capability.RECIPES),
        ("python -m verl.experimental.fully_async_policy.another_main a=1", Capability.ASYNC_TRAINERS),
    ],
)
def test_a_trainer_that_this_version_lacks_is_named(line: str, capability: Capability, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedRunError, match=re.escape(str(capability))):
        read(tmp_path, f"{line}\n")


def test_the_primary_file_is_looked_for_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/mine.yaml").write_text("data: {seed: 3}\n")
    for words in (
        "--config-path=config --config-name=mine",
        "-cp config -cn mine.yaml",
        "--config_path ./config --config_name mine",
    ):
        assert read(tmp_path, command(f"{words} a=1")).config == tmp_path / "config/mine.yaml"
    assert "did you mean mine?" in refusal(tmp_path, command("--config-path=config --config-name=mien"))


def test_one_of_several_calls_is_chosen_by_its_line(tmp_path: Path) -> None:
    """`train.py` of RAGEN reads config/base.yaml unless another file of that directory is named."""
    config = tmp_path / "config"
    config.mkdir()
    for name in ("base", "_2_sokoban"):
        (config / f"{name}.yaml").write_text("es_manager: {}")
    script = tmp_path / "train_all.sh"
    script.write_text(
        'BASE="a=1 b=2"\npython train.py --config-name _2_sokoban c=3 $BASE &\npython train.py d=4\n'
        "python -m ragen.eval e=5\n"
    )
    with pytest.raises(
        ConfigError,
        match=r"(?s)trains 3 times:\n  .*train_all\.sh:2  train\.py --config-name [^\n]*\n.*plan .*train_all\.sh:2",
    ):
        read_run_script(script)
    read = [read_run_script(Path(f"{script}:{line}"), {}) for line in (2, 3, 4)]
    assert [(one.config, one.dialect) for one in read] == [
        (config / "_2_sokoban.yaml", "ragen"),
        (config / "base.yaml", "ragen"),
        (config / "base.yaml", "ragen"),
    ]
    validates = ("trainer.val_only=true", "trainer.val_before_train=true")
    assert [one.words for one in read] == [("c=3", "a=1", "b=2"), ("d=4",), (*validates, "e=5")]


SWEEP = """\
MODELS=(small large)
train() {
  local model=$1 rate=$2
  python -m verl.trainer.main_ppo trainer.experiment_name=run-$model-$rate data.seed=1 \\
    actor_rollout_ref.model.path=$model actor.lr=$rate
}
for model in "${MODELS[@]}"; do
  export SIZE=$model
  for rate in 1e-6 1e-5; do
    train "$model" $rate
  done
done
"""


def test_one_of_the_iterations_of_a_sweep_is_chosen_by_line_and_number(tmp_path: Path) -> None:
    message = refusal(tmp_path, SWEEP)
    script = tmp_path / "run.sh"
    assert message.splitlines() == [
        f"{script} trains 4 times:",
        f"  {script}:4:1  actor_rollout_ref.model.path=small actor.lr=1e-6",
        f"  {script}:4:2  actor_rollout_ref.model.path=small actor.lr=1e-5",
        f"  {script}:4:3  actor_rollout_ref.model.path=large actor.lr=1e-6",
        f"  {script}:4:4  actor_rollout_ref.model.path=large actor.lr=1e-5",
        f"  name one of them: quintet plan {script}:4:1",
    ]
    third = read_run_script(Path(f"{script}:4:3"), {})
    assert third.words == (
        "trainer.experiment_name=run-large-1e-6",
        "data.seed=1",
        "actor_rollout_ref.model.path=large",
        "actor.lr=1e-6",
    )
    assert third.places[2] == f"{script}:5"
    assert [read_run_script(Path(f"{script}:4:{n}"), {}).environment["SIZE"] for n in (2, 3)] == ["small", "large"]
    for other in (f"{script}:4:5", f"{script}:4", f"{script}:9:1"):
        with pytest.raises(ConfigError, match="trains 4 times"):
            read_run_script(Path(other), {})


def test_long_sweeps_are_listed_in_part(tmp_path: Path) -> None:
    message = refusal(tmp_path, "for n in {1..199}; do python -m verl.trainer.main_ppo data.seed=$n; done\n")
    lines = message.splitlines()
    assert [len(lines), lines[-3].strip()] == [102, "… 100 more"]
    assert lines[-2].endswith("run.sh:1:199  data.seed=199")


def test_calls_that_differ_in_their_devices_only_are_one_run(tmp_path: Path) -> None:
    words = "trainer.experiment_name=run_$(date +%s) system.CUDA_VISIBLE_DEVICES=$n data.seed=1"
    found = read(tmp_path, f"for n in 0 1 2; do python -m ragen.train {words}; done\n")
    assert found.words[-2:] == ("system.CUDA_VISIBLE_DEVICES=0", "data.seed=1")


QUEUE = """\
RUNS=("ppo|1" "grpo|2")
next_run() { flock -x 9; cat queue.txt; }
while true; do
  index=$(next_run)
  if [ "$index" -lt 0 ]; then
    break
  fi
  IFS='|' read -r estimator seed <<< "${RUNS[$index]}"
  python -m verl.trainer.main_ppo algorithm.adv_estimator=$estimator data.seed=$seed kl=$last
  last=$seed
done
"""


def test_each_item_that_a_loop_may_take_at_a_position_that_is_not_known_is_a_run(tmp_path: Path) -> None:
    message = refusal(tmp_path, QUEUE)
    lines = [line.partition("  ")[2] for line in message.splitlines()[1:3]]
    assert [line.partition("  ")[2] for line in lines] == [
        "algorithm.adv_estimator=ppo data.seed=1",
        "algorithm.adv_estimator=grpo data.seed=2",
    ]
    second = read_run_script(Path(f"{tmp_path}/run.sh:9:2"), {})
    assert second.words == ("algorithm.adv_estimator=grpo", "data.seed=2")
    # an earlier iteration may have set it
    assert [value.key for value in second.missing] == ["kl"]


def test_a_function_with_a_local_variable_of_the_same_name_does_not_hide_the_item(tmp_path: Path) -> None:
    """RAGEN's sweeps take experiments from a queue like this."""
    text = """\
RUNS=(0.1 0.2)
run() { local value="$1"; python -m verl.trainer.main_ppo actor.optim.lr="$value"; }
work() {
  exec {LOCK}>queue.lock
  while true; do
    local index
    index=$(cat queue.txt)
    if [ "$index" -lt 0 ]; then break; fi
    local value="${RUNS[$index]}"
    run "$value" || true
  done
  exec {LOCK}>&-
}
work &
wait
"""
    lines = refusal(tmp_path, text).splitlines()[1:3]
    assert [line.partition("  ")[2].partition("  ")[2] for line in lines] == [
        "actor.optim.lr=0.1",
        "actor.optim.lr=0.2",
    ]


def test_a_value_of_an_earlier_iteration_is_not_taken_for_a_known_one(tmp_path: Path) -> None:
    text = "N=1; while grep -q x y; do python -m verl.trainer.main_ppo data.seed=$N; N=2; done\n"
    assert "$N depends on the `while` at line 1" in refusal(tmp_path, text)
    skipped = "for n in 1 2; do grep -q x y && continue; N=$n; done"
    assert "$N depends on the `for` at line 1" in refusal(tmp_path, command("data.seed=$N", skipped))


def test_programs_before_a_call_in_a_sweep_are_those_of_its_iteration(tmp_path: Path) -> None:
    text = DATASET.replace("python -m vagen.env", "for N in 7 9; do python -m vagen.env").replace(
        "room 7 8", "room $N 8"
    )
    (tmp_path / "run.sh").write_text(f"{text.rstrip()} data.seed=$N; done\n")
    for number, size in ((1, 7), (2, 9)):
        found = read_run_script(Path(f"{tmp_path}/run.sh:3:{number}"), {})
        assert f"env1.env_config.dim_room=[{size},8]" in found.words


def test_a_function_that_is_only_passed_on_is_read_with_unknown_arguments(tmp_path: Path) -> None:
    text = "run() { python -m verl.trainer.main_ppo data.seed=$1 data.shuffle=true; }\nexport -f run\n"
    found = read(tmp_path, f"{text}parallel run ::: 1 2\n")
    assert found.words == ("data.shuffle=true",)
    assert "$1 is given where the script or the function is called" in str(found.missing[0])
    assert read(tmp_path, f"{text}run 3\n").words == ("data.seed=3", "data.shuffle=true")


def test_the_gpus_of_this_machine_are_counted_as_nvidia_smi_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = "$(nvidia-smi -L 2>/dev/null | wc -l | tr -d ' ')"
    text = f"if command -v nvidia-smi >/dev/null 2>&1; then N={count}; else N=8; fi"
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert read(tmp_path, command("trainer.n_gpus_per_node=$N", text)).words == ("trainer.n_gpus_per_node=8",)
    program = tmp_path / "bin/nvidia-smi"
    program.write_text("#!/bin/false\n")
    program.chmod(0o755)
    monkeypatch.setattr("quintet.hardware.num_gpus", lambda: 4)
    assert read(tmp_path, command("trainer.n_gpus_per_node=$N", text)).words == ("trainer.n_gpus_per_node=4",)


def test_a_frameworks_own_file_says_what_its_reference_doesnt(tmp_path: Path) -> None:
    found = read(tmp_path, command("--config-name=ppo_megatron_trainer data.seed=1"))
    assert found.words == ("model_engine='megatron'", "data.seed=1")
    assert found.places[0] == f"{tmp_path}/run.sh:2"


def test_a_choice_among_a_frameworks_own_files_is_the_key_that_names_it(tmp_path: Path) -> None:
    script = "torchrun -m verl.trainer.sft_trainer engine=megatron optim=megatron optim.lr=1e-5\n"
    assert read(tmp_path, script).words == ("data.val_files=null", "engine.strategy=megatron", "optim.lr=1e-5")
    actor = "actor_rollout_ref.actor"
    assert read(tmp_path, command(f"actor@{actor}=mlite_actor")).words == (f"{actor}.strategy=mlite",)


def test_arithmetic_with_a_variable_that_is_not_set_names_it(tmp_path: Path) -> None:
    assert "$size is set neither" in refusal(tmp_path, command("data.seed=$(( (2 + 4) / size ))"))


def test_only_the_branch_of_a_case_that_runs_counts(tmp_path: Path) -> None:
    before = 'N=0\ncase "${KIND:-gpu}" in\n  npu) N=16 ;;\n  gpu|cuda) N=8 ;;\n  *) exit 1 ;;\nesac'
    assert read(tmp_path, command("trainer.n_gpus_per_node=$N", before)).words == ("trainer.n_gpus_per_node=8",)
    assert read(tmp_path, command("trainer.n_gpus_per_node=$N", before), KIND="npu").words[0].endswith("=16")


def test_a_device_that_a_script_asks_python_for_is_the_one_of_this_machine(tmp_path: Path) -> None:
    before = "D=$(python3 -c 'import no_such_package' 2>/dev/null && echo npu || echo gpu)"
    assert read(tmp_path, command("trainer.device=$D", before)).words == ("trainer.device=gpu",)
    before = before.replace("no_such_package", "pytest")
    assert read(tmp_path, command("trainer.device=$D", before)).words == ("trainer.device=npu",)


def test_a_script_that_ends_with_an_error_trains_nothing(tmp_path: Path) -> None:
    before = "N=6\nif (( N % (2 * 3) != 0 )); then\n  echo wrong\n  exit 1\nfi"
    assert read(tmp_path, command("data.seed=$N", before)).words == ("data.seed=6",)
    ended = refusal(tmp_path, command("data.seed=$N", before.replace("6", "8")))
    assert "run.sh:4: the script ends here before it trains" in ended
    assert "runs no known trainer" in refusal(tmp_path, "exit 1\necho done\n")


@pytest.mark.parametrize("check", ['[ "$#" -lt 2 ]', "(( $# < 2 ))", "[[ $# -ne 2 ]]"])
def test_a_script_that_asks_for_arguments_is_read_as_with_them(check: str, tmp_path: Path) -> None:
    before = f"usage() {{ echo two; exit 1; }}\nif {check}; then\n  usage\nfi\nN=$1; shift 2\nW=(data.seed=$N a=$NOPE)"
    found = read(tmp_path, command('"${W[@]}" data.shuffle=true', before))
    assert found.words == ("data.shuffle=true",)
    assert [value.key for value in found.missing] == ["data.seed", "a"]


def test_a_name_with_an_unknown_part_has_its_text_in_place(tmp_path: Path) -> None:
    found = read(tmp_path, command("trainer.experiment_name=run_$NOW trainer.default_local_dir=$1", "NOW=$(date +%s)"))
    assert found.words == ("trainer.experiment_name=run_date-s", "trainer.default_local_dir=argument-1")
    assert "$(date +%s)" in found.remarks[0]
    assert found.missing == ()


def test_vagens_envs_lie_beneath_its_words(tmp_path: Path) -> None:
    script = 'D="$( cd "$( dirname "${BASH_SOURCE[0]}" )" && pwd )"\n'
    script += 'python -m vagen.env.create_dataset \\\n    --yaml_path "$D/envs.yaml" \\\n\n'
    run = "python3 -m vagen.trainer.main_ppo rollout_manager.max_turns=3\n"
    (tmp_path / "envs.yaml").write_text("env1:\n  env_name: frozenlake\n")
    found = read(tmp_path, script + run)
    assert found.config == tmp_path / "envs.yaml"
    given = compose_config(found.config, found.words, found.places)
    assert given.sources["env1.env_name"] == f"{tmp_path}/envs.yaml:2"
    (tmp_path / "env_config.yaml").write_text("env2: {env_name: sokoban}\n")
    assert read(tmp_path, run).config == tmp_path / "env_config.yaml"
    assert "there is no" in refusal(tmp_path, script.replace("envs", "wolrds") + run)
    (tmp_path / "own.yaml").write_text("data: {seed: 3}\n")
    both = read(tmp_path, run.replace("rollout", "--config-name=own rollout"))
    assert both.config == tmp_path / "own.yaml"
    assert both.words[0] == "env2.env_name='sokoban'"
    assert both.places[0] == f"{tmp_path}/env_config.yaml:1"


LIST = """\
# what we change
algorithm.adv_estimator=bi_level_gae   # the turns'

rollout_manager.max_turns = 2 \\
+trainer.extra='# no comment'
~trainer.logger
trainer.project_name='vagen_new'
"""


@pytest.mark.parametrize("name", ["overrides.txt", "overrides", "vagen.list"])
def test_a_list_of_overrides_is_read_line_by_line(name: str, tmp_path: Path) -> None:
    found = read(tmp_path, LIST, name)
    assert found.dialect == "vagen"
    assert found.words == (
        "algorithm.adv_estimator=bi_level_gae",
        "rollout_manager.max_turns=2",
        "+trainer.extra='# no comment'",
        "~trainer.logger",
        "trainer.project_name='vagen_new'",
    )
    assert [place.rpartition(":")[2] for place in found.places] == ["2", "4", "5", "6", "7"]
    (tmp_path / "env_config.yaml").write_text("env1: {env_name: frozenlake}\n")
    assert read(tmp_path, LIST, name).config == tmp_path / "env_config.yaml"


def test_lists_are_told_from_yaml_and_dialects_from_keys(tmp_path: Path) -> None:
    assert read(tmp_path, "actor_rollout_ref.actor.optim.lr=1e-6\n", "a.txt").dialect == "verl"
    assert read(tmp_path, "training.steps=1\n", "a.txt").dialect is None
    assert read(tmp_path, "training: {steps: 1}\n", "a.conf") == RunScript(tmp_path / "a.conf")
    assert read(tmp_path, "a=1\n", "a.yaml") == RunScript(tmp_path / "a.yaml")
    assert "a.txt:2: two overrides on one line" in refusal(tmp_path, "a.b=1\nc.d=2 e.f=3\n", "a.txt")


def test_scripts_that_would_fill_the_memory_or_never_end_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintet.config.dialects.scripts.command_lists.MAX_COMMANDS", 1000)
    doubled = "A=xxxxxxxx\n" + "A=$A$A\n" * 60
    assert "too long" in refusal(tmp_path, command("data.seed=$A", doubled))
    array = "A=(a=1 b=2)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40
    assert "too long" in refusal(tmp_path, command('"${A[@]}"', array))
    deep = "${A:-" * 500 + "}" * 500
    assert "nested too deeply" in refusal(tmp_path, command(f"data.seed={deep}"))
    assert "nested too deeply" in refusal(tmp_path, "{ " * 500 + "}; " * 500)
    assert "is not integer" in refusal(tmp_path, command("data.seed=$((" + "(" * 500 + "1" + ")" * 500 + "))"))
    # each function calls the one before it twice
    functions = "f0() { :; }\n" + "".join(f"f{n}() {{ f{n - 1}; f{n - 1}; }}\n" for n in range(1, 30))
    assert "is called too deeply" in refusal(tmp_path, command("data.seed=1", f"{functions}f29"))
    loops = "for i in {1..200}; do " * 4 + ":; " + "done; " * 4
    assert "runs more than" in refusal(tmp_path, command("data.seed=1", loops))
    endless = "while true; do N=1; done"
    assert "$N depends on the `while` at line 1" in refusal(tmp_path, command("data.seed=$N", endless))
    substituted = "$(cat " * 200 + ")" * 200
    assert "run.sh:2" in refusal(tmp_path, command(f"data.seed={substituted}"))
    (tmp_path / "long.sh").write_text("#" * (1 << 19))
    with pytest.raises(MachineError, match="bytes"):
        read_run_script(tmp_path / "long.sh")


def test_files_that_arent_there_or_arent_text(tmp_path: Path) -> None:
    (tmp_path / "latin.sh").write_bytes(b"# \xe4\n")
    for name in ("nothing.sh", "latin.sh", "."):
        with pytest.raises(MachineError):
            read_run_script(tmp_path / name)


DATASET = """python -m vagen.env.sokoban.create_dataset --data_dir data/rooms --dim_room 7 8 --visual_env \\
    --max_action_per_step 3 --max_action_length 6 --train_ratio 0.75 --n_candidate 1000
python3 -m vagen.trainer.main_ppo data.train_files=data/rooms/train.parquet
"""


def test_the_arguments_of_vagens_first_create_dataset_are_the_section_of_its_environment(tmp_path: Path) -> None:
    found = read(tmp_path, DATASET)
    assert found.dialect == "vagen"
    words = dict(word.partition("=")[::2] for word in found.words)
    assert words["env1.env_name"] == "'sokoban'"
    assert (words["env1.train_size"], words["env1.test_size"], words["env1.max_action_length"]) == ("750", "250", "6")
    assert words["env1.env_config.dim_room"] == "[7,8]"
    assert words["env1.env_config.render_mode"] == "'vision'"
    assert words["env1.env_config.max_actions_per_step"] == "3"
    # its default
    assert words["env1.env_config.max_action_penalty"] == "-0.1"


def test_early_ragens_trainer_takes_the_name_of_an_environment(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/base.yaml").write_text("rl_or_sft: rl\n")
    (tmp_path / "config/lake.yaml").write_text("env: {name: frozenlake, env_kwargs: {size: 5}}\n")
    script = 'ENV_NAME=${1:-"lake"}\npython ragen/train.py "$ENV_NAME" "$@" | bash\n'
    found = read(tmp_path, script)
    assert (found.dialect, found.config) == ("ragen", tmp_path / "config/base.yaml")
    assert found.words == ("env.name='frozenlake'", "env.env_kwargs.size=5")
    file = read_run_script(tmp_path / "config/lake.yaml")
    assert (file.dialect, file.config, file.words) == ("ragen", tmp_path / "config/base.yaml", found.words)


def test_a_test_chooses_whether_there_is_a_word(tmp_path: Path) -> None:
    words = 'a=1 $([ "${ENGINE}" = "sglang" ] && echo "b=2") c=3'
    for engine, expected in (("sglang", ("a=1", "b=2", "c=3")), ("vllm", ("a=1", "c=3"))):
        assert read(tmp_path, command(words, f"ENGINE={engine}\n")).words == expected


@pytest.mark.parametrize(
    "line", ["source ~/.bashrc", "source /opt/no/venv/bin/activate", "source activate env", ". $CONF/x.sh", "source"]
)
def test_a_sourced_file_that_cannot_be_read_is_named(line: str, tmp_path: Path) -> None:
    before = f"BS=64\n{line} || exit 1"
    found = read(tmp_path, command("data.train_batch_size=$BS", before))
    assert found.words == ("data.train_batch_size=64",)
    (remark,) = found.remarks
    assert remark.startswith(f"{tmp_path}/run.sh:2: ")
    message = refusal(tmp_path, command("data.seed=$SEED", before))
    assert "$SEED is set neither in the script nor in the environment; it may be set at line 2, where" in message


def test_what_a_sourced_file_sets_is_unknown_if_it_cannot_be_followed(tmp_path: Path) -> None:
    file = tmp_path / "env.sh"
    file.write_text("BS=128\nselect n in 1 2; do N=$n; done\n")
    message = refusal(tmp_path, command("data.train_batch_size=$BS data.seed=$N", f"BS=64 N=1\nBS=64\n. {file}"))
    assert f"$BS may be set by {file}, which cannot be followed ({file}:2: `select` is not supported" in message
    file.write_text("grep -q x y && return\nBS=128\n")
    text = command("data.train_batch_size=$BS data.seed=$A", f"BS=64 A=1\nA=1\n. {file}")
    assert [value.key for value in read(tmp_path, text).missing] == ["data.train_batch_size"]
    assert f"$BS may be set by {file}" in refusal(tmp_path, text)
    file.write_text("N=$(date +%s)\n")
    assert f"is the output of a program, and none is run here ({file}:1)" in refusal(
        tmp_path, command("data.seed=$N", f"source {file}")
    )


def test_words_of_a_trainer_in_another_file_have_its_lines(tmp_path: Path) -> None:
    (tmp_path / "lib.sh").write_text(
        "# common\ntrain() {\n  python -m verl.trainer.main_ppo data.seed=$1 \\\n    a=1\n}\n"
    )
    text = 'source "$(dirname "$0")/lib.sh"\ntrain 1\n'
    assert read(tmp_path, text).places == (f"{tmp_path}/lib.sh:3", f"{tmp_path}/lib.sh:4")
    message = refusal(tmp_path, f"{text}train 2\n")
    assert f"{tmp_path}/run.sh:2  data.seed=1\n  {tmp_path}/run.sh:3  data.seed=2" in message
    assert read_run_script(Path(f"{tmp_path}/run.sh:3"), {}).words == ("data.seed=2", "a=1")


def test_a_script_that_a_script_runs_is_followed_with_its_arguments_and_environment(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    inner = tmp_path / "scripts/inner.sh"
    inner.write_text(command('data.seed=$SEED trainer.nnodes=${1:-4} c=${LOCAL:-no} "${@:2}"'))
    cd = 'cd "$(dirname "$0")"\nLOCAL=1\n'
    found = read(tmp_path, f"{cd}export SEED=1\nSEED=2 bash scripts/inner.sh 8 d=1\n")
    assert found.words == ("data.seed=2", "trainer.nnodes=8", "c=no", "d=1")
    assert found.places[0] == f"{inner}:2"
    assert found.environment["SEED"] == "2"
    two = f"{cd}export SEED=1\nbash scripts/inner.sh 1\nexec ./scripts/inner.sh 2\n"
    assert "run.sh:4  trainer.nnodes=1" in refusal(tmp_path, two)
    assert read_run_script(Path(f"{tmp_path}/run.sh:5"), {}).words[1] == "trainer.nnodes=2"
    # one of its own is the run
    assert read(tmp_path, f"{cd}bash scripts/inner.sh\n{command('data.seed=3')}").words == ("data.seed=3",)
    # those of the script are on the command line
    assert [each.key for each in read(tmp_path, f'{cd}SEED=$1 bash scripts/inner.sh "$@"\n').missing] == ["data.seed"]


@pytest.mark.parametrize("name", ["link.sh", "linked/secret.sh"])
def test_a_file_that_only_a_link_leads_to_is_not_read(tmp_path: Path, name: str) -> None:
    """The link may come with a downloaded directory, and lead to a file of the user."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret.sh").write_text("SEED=1234\n")
    place = tmp_path / "downloaded"
    place.mkdir()
    (place / "link.sh").symlink_to("../outside/secret.sh")
    (place / "linked").symlink_to("../outside")
    text = f'cd "$(dirname "$0")"\nsource {name}\n{command("data.seed=$SEED")}'
    found = read(place, text)
    assert "1234" not in str(found.words)
    assert "by a link out of the script's directory" in str(found.missing)
    assert read(place, text.replace(name, "../outside/secret.sh")).words == ("data.seed=1234",)


def test_a_script_that_cannot_be_followed_is_named_with_what_to_do(tmp_path: Path) -> None:
    message = refusal(tmp_path, "N=3\nbash nothing.sh a=$N\n")
    assert "run.sh:2 runs the script nothing.sh, which is no file on this machine" in message
    assert "quintet plan nothing.sh a=3" in message
    (tmp_path / "inner.sh").write_text(f"select n in 1 2; do {command('a=1')}; done\n")
    assert f"which cannot be followed ({tmp_path}/inner.sh:1: `select`" in refusal(
        tmp_path, f"sh {tmp_path}/inner.sh\n"
    )
    (tmp_path / "inner.sh").write_text("echo hello\n")
    assert "which runs no known trainer" in refusal(tmp_path, f"nohup bash {tmp_path}/inner.sh &\n")


def test_files_that_read_each_other_end(tmp_path: Path) -> None:
    for word in ("source", "bash"):
        text = f'{word} "{tmp_path}/run.sh"\n' * 2
        assert read(tmp_path, text + command("data.seed=1")).words == ("data.seed=1",)
    (tmp_path / "long.sh").write_text("#" * (1 << 19))
    (remark,) = read(tmp_path, command("a=1", f"source {tmp_path}/long.sh")).remarks
    assert "long.sh cannot be read" in remark
    assert read(tmp_path, command("a=1", f"source {'x' * 999}; . /dev/zero")).words == ("a=1",)


def test_nothing_of_another_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "inner.sh").write_text(f"touch {mark}\nX=$(touch {mark})\neval 'touch {mark}'\n")
    run = f"source {tmp_path}/inner.sh; bash {tmp_path}/inner.sh; {tmp_path}/inner.sh; let 'x=$(touch {mark})'"
    read(tmp_path, command("data.seed=1", f'{run}; eval "touch {mark}"; declare -i "y=$(touch {mark})"'))
    assert not mark.exists()


def test_what_eval_sets_is_unknown_if_its_words_are(tmp_path: Path) -> None:
    text = command("data.seed=$N trainer.nnodes=$M", 'N=1\nM=1\neval "N=$(x)"\neval "$(conda shell.bash hook)"')
    found = read(tmp_path, text)
    assert [value.key for value in found.missing] == ["data.seed"]
    assert found.words == ("trainer.nnodes=1",)
    assert "run.sh:4: `eval $(conda shell.bash hook)` has a command that is not known" in found.remarks[0]
    assert read(tmp_path, 'RUN="python -m verl.trainer.main_ppo data.seed=1"\neval $RUN a=1\n').words[1] == "a=1"
    broken = 'N=1\neval "select n in 1 2; do python -m verl.trainer.main_ppo; done"\n'
    assert "run.sh:2: `select` is not supported" in refusal(tmp_path, broken)


@pytest.mark.parametrize("line", ["let 'N=2**-1'", "((N = 1 / 0))", "((N++ + 08))", "[[ x && $((N=M)) ]]"])
def test_arithmetic_that_bash_refuses_leaves_no_earlier_value(line: str, tmp_path: Path) -> None:
    assert "$N is" in refusal(tmp_path, command("data.seed=$N", f"N=1\n{line}"))


@pytest.mark.parametrize("expression", ["1/0", "08", "1 +", "2 3", "16#g", "2**-1"])
def test_a_script_that_bash_ends_at_an_expression_is_refused_at_its_line(expression: str, tmp_path: Path) -> None:
    assert "run.sh:1: $((" in refusal(tmp_path, command("data.seed=1", f"N=$(({expression}))"))


def test_a_variable_given_as_an_override_is_written_before_the_command(tmp_path: Path) -> None:
    text = command("trainer.total_epochs=${EPOCHS}", before="EPOCHS=${EPOCHS:-3}")
    message = refusal(tmp_path, text, overrides=("EPOCHS=5",))
    assert "EPOCHS (command line) is no key, but an environment variable that the script reads" in message
    assert "EPOCHS=5 quintet plan" in message
    assert "trainer.total_epochs=5" in read(tmp_path, text, EPOCHS="5").words
    assert "OTHER=5" in read(tmp_path, text).with_overrides(("OTHER=5",)), "reported as an unknown key"


def test_an_unset_variable_is_named_with_how_to_set_it(tmp_path: Path) -> None:
    message = refusal(tmp_path, command("data.train_files=$DATA_DIR/train.parquet"))
    assert f"DATA_DIR=… quintet plan {tmp_path}/run.sh" in message
    text = command("data.train_files=$DATA_DIR/train.parquet", "set -u")
    assert "$DATA_DIR is not set, and `set -u` ends the script" in refusal(tmp_path, text)
    assert read(tmp_path, text, DATA_DIR="/d").words == ("data.train_files=/d/train.parquet",)


def test_the_condition_that_ends_a_script_is_named(tmp_path: Path) -> None:
    text = command("data.seed=1", 'if [ -z "$MODEL_PATH" ]; then\n  echo no model\n  exit 1\nfi')
    message = refusal(tmp_path, text)
    assert 'run.sh:3: the script ends here before it trains: the condition is `[ -z "$MODEL_PATH" ]`' in message
    assert "MODEL_PATH=… quintet plan" in message
    assert read(tmp_path, text, MODEL_PATH="x").words == ("data.seed=1",)


def test_positional_arguments_are_those_after_the_dashes(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(command('data.seed=$1 data.n=$# "${@:2}"', "if [ $# -lt 1 ]; then exit 1; fi"))
    assert read_run_script(script, {}, ["7", "a=1"]).words == ("data.seed=7", "data.n=2", "a=1")
    with pytest.raises(ConfigError, match="ends here before it trains"):
        read_run_script(script, {}, [])


def test_a_line_without_the_backslash_before_it_is_an_error_with_its_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, command("data.seed=1\n    data.shuffle=true"))
    assert "run.sh:3: data.shuffle=true is no command: no backslash connects this line" in message


def test_a_quote_that_begins_in_the_name_of_a_module_is_no_error(tmp_path: Path) -> None:
    """What follows up to the next quote is part of the name, and no trainer's."""
    lines = (
        "python3 -m vagen.trainer.mai\"_p'o",
        "actor_rollout_ref.model.path=a/\x1bb-7B",
        'actor_rollout_ref.roll"ut.n=2',
    )
    assert "trainer" in refusal(tmp_path, " \\\n    ".join(lines) + " \\")


@pytest.mark.parametrize("start", ["", "IFS=,\n"])
def test_a_command_in_one_word_starts_nothing(tmp_path: Path, start: str) -> None:
    """Bash looks for a program of that name: the words of a variable are split at IFS only."""
    one_word = '"$COMMAND"' if not start else "$COMMAND"
    script = f"{start}COMMAND='{command('data.seed=1')}'\n{one_word}\n"
    assert "runs no known trainer" in refusal(tmp_path, script)
    assert read(tmp_path, script.replace(start, "").replace(one_word, "$COMMAND")).words == ("data.seed=1",)
