"""Generator of small run scripts over the constructs that real scripts use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from bash_scripts import TRAIN

NAMES = ("A", "B", "BS", "N", "M", "P")
LITERALS = (
    *("1", "8", "256", "010", "0x1F", "-3", "fast", "x", "gpu", "a/b", "/a/b/c.tar.gz", "Qwen/Qwen2.5-7B", "1e-6"),
    *("True", "[1,2]", "a*", "~/m", "a:~/x", "{1,2}", "a=b", "a,b", "x-y_z", "no#comment", "%d", "*.none", "d[a]ta"),
)
QUOTED = (
    *('"two words"', "'two  words'", '""', "''", '"it\'s"', "'*'", '"a*"', "'$A'", '"\\$A"', '"a\\\\b"', "'[\"console\"]'"),
    *("\"['x', 'y']\"", "a\\ b", "\\~", '"a"b\'c\'', "$'a\\tb'", '$"loc"', "'~/m'", '"~/m"', "'{1,2}'", '"a\\"b"'),
    *("a'b c'd", '"x  "', "' '", "'a\\b'", '"a\\nb"'),
)
EXPANSIONS = (
    *("${V}", "$V", "${V:-d}", "${V-d}", "${V:+alt}", "${V+alt}", "${V:=new}", "${#V}", "${V#*/}", "${V##*/}"),
    *("${V%.*}", "${V%%.*}", "${V/a/x}", "${V//a/x}", "${V/#a/x}", "${V/%z/x}", "${V//[0-9]/}", "${V^^}", "${V,,}"),
    *("${V^}", "${V,}", "${V:1}", "${V:0:2}", "${V: -2}", "${V:1:-1}", "${V@Q}", "${!V}", "${V:-$W}", '${V:-"a b"}'),
    *("${V:-${W:-z}}", "${V/$W/q}", "${V#$W}", "${V%\"$W\"}", "${UNSET:-d}", "${UNSET-}", "${UNSET:-a b}", "${V//\\//_}"),
    *("${V/a*/x}", "${V:?}", "${V:-}", "${V+}", "${V:+$W}", "${V:2:1}", "${HOSTNAME:-h}", "${V%%*}", "${V#?}", "${V%?}"),
    *("${V//x}", "${V/?/-}", "${V:+\"$V\"}", "$V$W", "pre$V", "${V}post", "$V/$W", "${V%'c'}", "${V:-'q r'}"),
)
ARITHMETIC = (
    *("1+2", "N + 1", "$N*2", "7/2", "-7/2", "-7%3", "2**3", "1<<4", "010", "0x1f", "2#101", "16#ff", "N>2?5:6"),
    *("(N+1)*2", "!N", "~N", "N&3|4", "N^1", "N==8", "N<M", "N&&M", "N||0", "1,2", "N++", "++N", "N-=2", "N*=2", "M=N=4"),
    *("UNSET+1", "-N", "+N", "2*(3+4)-N", "${#A}+1", "N%5", "10#08", "(N > 2) && (M < 5)", "9223372036854775807+1"),
    *("N<<=1", "5 - -2", "1/0", "08", "1+", "RANDOM*0", "N--", "A", "BS / 2 * 2", "BS/16", "1024 * 8", "7>>1", "3 != 4"),
)
SUBSTITUTIONS = (
    *("echo V", "echo $V", 'echo "$V"', "echo -n x y", "basename /m/Qwen/", "basename /a/b/c.sh .sh", "dirname /a/b/"),
    *("dirname a", "dirname $V", "basename $V", 'basename "$V" .gz', "expr $N + 1024", "expr 7 / 2", "expr $N \\* 2", "seq 3"),
    *("seq 2 4", "nproc", "date +%Y", "pwd", "cd /tmp && pwd", "cd /nonexistent && pwd", "echo $V | cut -d/ -f1"),
    *("echo $V | tr a-z A-Z", "echo $V | tr / _", "printf '%s' $V", "printf '%s,' a b", "printf '%02d' 7", "cat one.txt"),
    *("true", "false", "echo a; echo b", "echo $((N+1))", "f1 $V", "echo -e 'a\\tb'", "echo $V | sed s/a/x/", "seq -s, 3"),
    *("python -c 'print(1)'", "V=5; echo $V", "echo '*'", "echo {1..3}", "if true; then echo y; else echo n; fi", "uname -s"),
    *("for i in 1 2; do echo $i; done", "hostname -s", "cat <<< $V", "wc -l < one.txt", "realpath .", "echo ~", "ls data"),
    *("echo a b | awk '{print $1}'", "[ 1 = 1 ] && echo eq", "[[ $V == a* ]] && echo m || echo n", "test -d data && echo d"),
    *("command -v python3", "which nothing", "echo \"a  b\"", "basename -s .sh run.sh", "dirname -- \"$0\"", "echo $0"),
    *("date +%Y | cut -c1-2", "echo 'x y' | rev", "declare -p A", "type -t cd", "echo $#", "echo \"$@\"", "readlink -f ."),
)
TESTS = (
    *('[ "$V" = fast ]', "[ $V = x ]", '[[ $V == a* ]]', '[[ $V == "a*" ]]', '[[ "$V" = $W ]]', '[ -z "$V" ]', "[ -n $V ]"),
    *('[ -n "$V" ]', "[[ -z $V ]]", "[ $N -gt 2 ]", "[[ $N -eq 8 ]]", "[[ 010 -eq 8 ]]", "[ 010 -eq 8 ]", "(( N > 2 ))"),
    *("[[ $V =~ ^[0-9]+$ ]]", "[[ $V =~ (a|b)/ ]]", '[ -f one.txt ]', "[ -d data ]", "[ -e /nonexistent ]", "true", "false"),
    *('[[ $V != x* ]]', '[ ! -d nothing ]', '[[ ! $V == x ]]', '[ "$V" = x -o "$W" = x ]', '[ "$V" != x -a 1 = 1 ]', "! true"),
    *("[[ $V == x || $W == x ]]", "[[ $V && $W ]]", "[[ ( $V == x || 1 == 1 ) && $W != y ]]", "[ $# -eq 0 ]", "(( $# > 0 ))"),
    *("[[ -v A ]]", "[[ -v UNSET ]]", "[[ $V < m ]]", '[ "$V" \\< m ]', "[[ a -nt b ]]", "[ -t 1 ]", "test $N -le 8", "[ x$V = xx ]"),
    *("[ -s one.txt ]", "[ -x run.sh ]", "[ -r one.txt ]", "[ -L one.txt ]", "[[ $N -lt M ]]", "[[ $V == [a-z]* ]]", "(( N ))"),
    *("[ $V ]", "[ ]", "[ = ]", "[[ $V == @(x|y) ]]", "[ -o errexit ]", "command -v nothing", "command -v cd >/dev/null", ":"),
    *('[ "${UNSET:-}" = "" ]', "[[ $V =~ $W ]]", "[ \"$V\" == \"$W\" ]", "[[ x$V == x$W ]]", "grep -q zzz one.txt", "((N%2==0))"),
    *("[ $N -ge 2 ] && [ $N -lt 100 ]", "[[ -n $V && -n $W ]]", "{ true; }", "( exit 1 )", "cd data", "f1", "test -n"),
)
PATTERNS = (
    *("x", "gpu|cuda", "*", '"*"', "a*", "[0-9]*", "fast", '"$W"', "$W", "?", "(x", "'a b'", "[!a]*", "256", "a\\*", "*/*", '""'),
    *("@(x|y)", "[[:digit:]]*", "-*", "~/m", "8|0x1F", "$W*", "*'.'*"),
)
STATEMENTS = (
    *('export "BS=512"', "export BS=512", "export A B", "readonly P=ro", "declare -x BS=9", "declare -i N=3+4", "declare -i N; N=2*3"),
    *("declare -l M=ABC", "declare -u M; M=abc", "declare -n ref=BS; ref=512", "typeset BS=7", "unset BS", "unset -v A B", "unset -f f1"),
    *("declare -r BS=3", "declare +x BS", "declare A B", "export -n BS", "local X=1", "let BS+=1", 'let "N = N * 2" M=1', "let N++"),
    *("((N++))", "((BS=N*2))", "((N+=2, M=N))", "(( BS <<= 1 )) || true", "BS+=1", "A+=x", "printf -v BS '%s' 512", "printf -v BS x"),
    *("read BS <<< '7 8'", "read -r A B <<< 'x y z'", "IFS=, read -r A B <<< 'x,y,z'", "read -ra ARR <<< 'p q'", "read BS < one.txt"),
    *("read -d '' BS <<< 'a'", "read BS", "mapfile -t ARR < one.txt", "mapfile -t ARR <<< 'l1'", "readarray ARR < /dev/null"),
    *("getopts ab: BS", "getopts ab: BS -a", "shift", "shift 1 || true", "set -- data.s=1 data.t=2", "set -- x 'y z'", "set -- $A"),
    *("eval BS=77", "eval \"BS=$N\"", "eval 'A=5; B=6'", "eval \"$A=1\"", "source env.sh", ". ./env.sh u", "source fails.sh"),
    *("source nothing.sh", "[ -f env.sh ] && source env.sh", "greet you", "cd data", "cd /nonexistent", "cd -", "cd", "cd ..", "cd data && A=$(pwd)"),
    *("pushd data", "pushd data >/dev/null; popd", "pushd /nonexistent && BS=1", "cd /nonexistent && BS=512 || BS=256", "A=$PWD", "A=${PWD##*/}"),
    *("set -e", "set -u", "set -x", "set -ex", "set -o pipefail", "set -euo pipefail", "set -f", "set +e", "set -a", "set -o nounset"),
    *("set -o errexit", "set -n", "shopt -s nullglob", "shopt -s extglob", "shopt -s expand_aliases; alias python3=false", "set +x"),
    *("shopt -s lastpipe", "shopt -s nocasematch", "alias ll=ls", "alias python3='python3 -m x'", "trap 'BS=9' DEBUG", "trap 'echo x' EXIT"),
    *("trap 'BS=9' ERR; false", "trap - INT", "trap '' TERM", "trap cleanup EXIT INT", "umask 022", "ulimit -n 100", "wait", "sleep 0 &"),
    *("hash -r", "times >/dev/null", "jobs", "type cd >/dev/null", "builtin cd data", "command cd data", "builtin export BS=3", "command true"),
    *("exec 3>&1", "exec >log.txt 2>&1", "exec true", "enable -n echo", "echo hi", "echo hi >&2", "mkdir -p out", "rm -f out", "touch x.parquet"),
    *("ls /nonexistent", "which python3", "(BS=5)", "{ BS=5; }", "{ BS=5; } | cat", "echo x | read BS", "BS=5 | cat", "BS=5 &", "true | BS=3"),
    *("BS=6 true", "BS=6 :", "BS=6 eval 'A=$BS'", "A=1 B=$A", "A=1 export B=2", "BS=7 f1", "N=5 M=$((N+1))", ": ${BS:=4}", ": ${UNSET:=4}"),
    *(": ${A:?}", ": ${UNSET:?}", ': "${UNSET:?is needed}"', "${UNSET:-:}", "$UNSET", "$(echo true)", ": $((N=9))", ": $((BS++))", "[ $((N++)) ]"),
    *("A='x\ny'", "A=$'l1\\nl2'", "ARR=(a 'b c' d)", "ARR=()", "ARR+=(e)", "ARR[1]=z", "ARR[5]=z", "ARR=([2]=x [0]=y)", "ARR=(data/*.parquet)"),
    *("ARR=({1..3})", "ARR=($A)", 'ARR=("$A" "$B")', "ARR=(*.none)", "ARR=(~/m)", "ARR=($(seq 2))", "unset ARR[0]", "unset 'ARR[1]'", "ARR=x"),
    *("declare -a ARR=(q r)", "declare -A D", "declare -A D=([k]=v [l]='w x')", 'D["a"]=x', "D[b]=y", "D[$A]=z", "D+=([m]=n)", "ARR[N]=9", "declare -a ARR"),
    *("f1() { echo $1; }", "f1() { BS=$1; }", "f1() { local BS=1; A=$BS; }", "f1() { declare -g BS=512; }", "f1() { return 1; }", "function f1 { N=3; }"),
    *("f1() { set -- q; A=$1; }", "f1() { shift; A=$1; }", "f1() ( BS=8 )", "f1() { exit 0; }", "f1() { declare BS=3; }", "f1() { local -r A=2; B=$A; }"),
    *("f1", "f1 x y", "f1 $A", "f1 || true", "f1 | cat", "(f1)", "f1 &", "f1 && A=1", "f1 >/dev/null", "! f1", "f1() { f2; }; f2() { N=7; }"),
    *("python3 - <<EOF\nBS=3\nEOF", "cat <<EOF >/dev/null\n  EOF\nBS=4\nEOF", "cat <<-EOF >/dev/null\n\tBS=4\n\tEOF", "cat <<'EOF'\n$X `\nEOF"),
    *("cat > f.sh <<EOF\nBS=$N\nEOF", "cat <<\"E F\"\nx\nE F", "cat <<EOF; BS=5\nx\nEOF", "python3 -c 'import sys'", "python3 x.py --a=1 | tee l"),
    *("# a comment", "A=1 # comment", "A=a#b", "A=$((1 + # c\n2))", ":", ";", "true; false", "false", "true", "! true", "false || true", "false && BS=1"),
    *("A=1 \\\n  B=2", "A=one\\\ntwo", "if true\nthen BS=3\nfi", "A=`echo x`", "A=`basename \\`echo /a/b\\``", "A=$[4*2]", "BS=$(( BS + 1 ))"),
    *("IFS=,", "IFS=/; set -- $A; unset IFS", "IFS=$'\\n'", "IFS=", "unset IFS", "PATH=/nonexistent:$PATH", "HOME=/h", "HOME=/h; A=~", "PWD=/x", "OLDPWD=/tmp; cd -"),
    *("LC_ALL=C", "export LC_ALL=C", "A=$RANDOM", "A=$LINENO", "A=$$", "A=$?", "A=$!", "A=$-", "A=$_", "A=$UID", "A=$SHLVL", "A=$0", "A=$BASH_VERSION"),
    *("A=${BASH_SOURCE[0]}", "A=$FUNCNAME", "A=${PIPESTATUS[0]}", "A=$EUID", "A=$HOSTNAME", "A=$SECONDS", "A=$OSTYPE", "A=$(cd \"$(dirname \"${BASH_SOURCE[0]}\")\" && pwd)"),
    *("break", "continue", "return", "return 0 2>/dev/null", "exit 0", "exit 1", "[ -z \"$A\" ] && exit 1", "[ \"$A\" = x ] || exit 1", "true || exit"),
    *("A=x; A=$A", "echo $A > out.txt", "cat out.txt", "A=$(<one.txt)", "A=$(cat <(echo q))", "diff <(echo a) <(echo b)", "tee x < /dev/null", "coproc cat"),
    *("select x in a b; do break; done < /dev/null", "time BS=3", "time true", "time { BS=3; }", "nohup true", "A=$(nproc); A=${A:+n}", "bash inner.sh", "A=q bash inner.sh 1"),
    *("export A; bash ./inner.sh", "sh inner.sh x", "./inner.sh", "bash -c 'BS=3'", f"bash -c '{TRAIN} c=1'", "bash nothing.sh", "timeout 5 true", "nice true"),
    *("echo data.x=1 | xargs true", "yes | head -1", "A=$(echo a | xargs)", "printf '%s\\n' a b | while read x; do BS=$x; done", "A=x B=y C=z", "logout"),
    *("caller", "bind -p", "compgen -v >/dev/null", "suspend -x", "test 1 = 1 && BS=9", "[ 1 = 2 ] || BS=8", "while read x; do BS=$x; done < one.txt"),
    *("while IFS= read -r l; do BS=$l; done <<< 'p'", "until true; do BS=3; done", "while false; do BS=1; done", "for i; do BS=$i; done", "for i in; do BS=1; done"),
)
WORDS = (
    *("data.k={1,2}", "data.k={8..10}", "data.k={01..03}", "data.{a,b}=1", "{data.a,data.b}=1", "data.k=~/m", "k=~/m", "data.k={a}", "data.k={}"),
    *("data.k=[1,2]", "data.k='[1,2]'", 'data.k="$A"', "data.k=$A", "$A", '"$A"', "+data.k=$BS", "++data.k=$N", "~data.k", "data.k=", 'data.k=""'),
    *('"$@"', "$@", "$*", '"$*"', "${@:2}", '"${@:1:1}"', "data.n=$#", "data.f=$1", "data.f=${1:-d}", "data.f=${2-}", "data.f=$3", '"${ARR[@]}"', "${ARR[@]}"),
    *('"${ARR[*]}"', "data.k=${ARR[0]}", "data.k=${ARR[1]}", "data.k=${#ARR[@]}", "data.k=${ARR}", '"data.k=${ARR[*]}"', "data.k=${ARR[-1]}", "data.k=${ARR[N]}"),
    *('"${!ARR[@]}"', "data.k=${D[a]}", 'data.k=${D["b"]}', '"${D[@]}"', '"${!D[@]}"', "data.k=${D[k]}", "data.k=${#D[@]}", "data.k=${ARR[@]:1}", '"${ARR[@]/a/x}"'),
    *("data.k=$((N+1))", "data.k=$[N+1]", "data.k=${BS}", "data.k=`echo 1`", "data.k=$(echo a b)", '"data.k=$(echo a b)"', "data.k=$FIRST", "$ONLY_THERE", "data.p=$PWD"),
    *("2>&1", ">log.txt", "</dev/null", "data.k=a\\ b", "data.k='it''s'", "data/*.parquet", "data.k=*.none", "*.txt", "data.k=$BS\\\n", "data.k=$'x\\ty'", "data.k=!x"),
    *("data.k=a#b", "data.k=\"a\n b\"", "data.k=\\\n1", "data.k=${E:-}", '${UNSET:+x=1}', "${A:+data.a=$A}", "data.k=@x", "data.k=50%", "data.k=a:b", "<(echo)", "data.k=$N$M"),
)
CALLS = (
    *(f"{TRAIN} W",) * 12,
    *(f"X=1 {TRAIN} W", f"nohup {TRAIN} W", f"env Q=1 {TRAIN} W", f"time {TRAIN} W", f"{TRAIN} W 2>&1 | tee log.txt", f"{TRAIN} W &"),
    *(f"exec {TRAIN} W", f"torchrun --standalone -m verl.trainer.main_ppo W", f"ray job submit -- {TRAIN} W", f"srun {TRAIN} W", f"{TRAIN} W > log.txt"),
    *(f"echo data.x=1 | xargs {TRAIN} W", f"CMD='{TRAIN} data.c=1'; $CMD W", f'eval "{TRAIN} W"', f"({TRAIN} W)", f"{{ {TRAIN} W; }}", f"A=9 {TRAIN} W"),
    *(f"if true; then {TRAIN} W; fi", f"true && {TRAIN} W", f"false || {TRAIN} W", f"train() {{ {TRAIN} W; }}\ntrain z", f"! {TRAIN} W", f"BS=4 {TRAIN} W"),
    *(f"for BS in 4 8; do {TRAIN} W; done", f"C=({TRAIN} data.c=1); \"${{C[@]}}\" W", f"set -x; {TRAIN} W", f"{TRAIN} W || exit 1", f"nice -n 5 {TRAIN} W"),
    *(f"{TRAIN} \\\n  W \\\n  # comment\n  data.z=1", f"{TRAIN} \\\n  W\n  data.z=1", f"{TRAIN} W # end", f"command {TRAIN} W", f"timeout 5 {TRAIN} W", f"</dev/null {TRAIN} W"),
    *(f"{TRAIN} \\\n  W \\\n\ndata.z=1", f"stdbuf -o0 {TRAIN} W", f"python -u -m verl.trainer.main_ppo W", f"cd data; {TRAIN} W", f"$(echo {TRAIN}) W", f"\\{TRAIN} W"),
)


class ScriptGenerator:
    """Combines constructs into scripts."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.loops = 0

    def script(self) -> tuple[str, tuple[str, ...]]:
        """Return a script and its positional arguments."""
        choose = self.random
        names = NAMES if choose.random() < 0.8 else choose.sample(NAMES, 3)
        lines = [f"{name}={self._value()}" for name in names]
        lines += ["N=8 M=4"] if choose.random() < 0.8 else []
        lines += ["ARR=(a 'b c')"] if choose.random() < 0.5 else []
        lines += ["declare -A D=([a]=1 [k]='v w')"] if choose.random() < 0.3 else []
        lines += ["f1() { echo ${1:-none}; }"] if choose.random() < 0.4 else []
        lines += [self._statement(2) for _ in range(choose.randint(1, 5))]
        lines.append(self._call())
        lines += [self._statement(1)] if choose.random() < 0.1 else []
        count = choose.choice((0, 0, 0, 1, 2, 3))
        return "\n".join(lines) + "\n", tuple(choose.choice(("data.q=1", "x", "a b", "")) for _ in range(count))

    def _fill(self, template: str) -> str:
        """Replace the variables of a template."""
        return template.replace("$V", f"${self._name()}").replace("${V", "${" + self._name()).replace(
            "{#V", "{#" + self._name()
        ).replace("{!V", "{!" + self._name()).replace("$W", f"${self._name()}")

    def _name(self) -> str:
        return self.random.choice(NAMES)

    def _value(self) -> str:
        choose = self.random
        kinds: Sequence[Callable[[], str]] = (
            lambda: choose.choice(LITERALS),
            lambda: choose.choice(QUOTED),
            lambda: self._fill(choose.choice(EXPANSIONS)),
            lambda: f'"{self._fill(choose.choice(EXPANSIONS))}"',
            lambda: f"$(({choose.choice(ARITHMETIC)}))",
            lambda: self._substitution(),
        )
        return choose.choices(kinds, (5, 4, 4, 3, 2, 2))[0]()

    def _substitution(self) -> str:
        text = f"$({self._fill(self.random.choice(SUBSTITUTIONS))})"
        return f'"{text}"' if self.random.random() < 0.4 else text

    def _test(self) -> str:
        return self._fill(self.random.choice(TESTS))

    def _statement(self, depth: int) -> str:
        choose = self.random
        simple: Sequence[Callable[[], str]] = (
            lambda: f"{self._name()}={self._value()}",
            lambda: choose.choice(STATEMENTS),
            lambda: f"{self._test()} && {self._name()}={self._value()}",
            lambda: f"{self._test()} || {self._name()}={self._value()}",
            lambda: f"{choose.choice(('export', 'declare', 'readonly', 'typeset'))} {self._name()}={self._value()}",
        )
        compound: Sequence[Callable[[int], str]] = (self._if, self._case, self._for, self._while, self._group)
        if depth and choose.random() < 0.35:
            return choose.choice(compound)(depth - 1)
        return choose.choices(simple, (4, 8, 2, 2, 1))[0]()

    def _body(self, depth: int) -> str:
        return "\n".join(self._statement(depth) for _ in range(self.random.randint(1, 2)))

    def _if(self, depth: int) -> str:
        middle = f"\nelif {self._test()}; then\n{self._body(depth)}" if self.random.random() < 0.3 else ""
        end = f"\nelse\n{self._body(depth)}" if self.random.random() < 0.6 else ""
        return f"if {self._test()}; then\n{self._body(depth)}{middle}{end}\nfi"

    def _case(self, depth: int) -> str:
        branches = [
            f"  {self._fill(self.random.choice(PATTERNS))}) {self._body(depth)} {self.random.choice((';;',) * 40 + (';&', ';;&'))}"
            for _ in range(self.random.randint(1, 3))
        ]
        word = self.random.choice((f"${self._name()}", f'"${self._name()}"', self._value()))
        return "\n".join([f"case {word} in", *branches, "esac"])

    def _for(self, depth: int) -> str:
        header = self.random.choice(
            (
                *("for i in 1 2", "for BS in 1 2 3", "for i in {1..3}", "for ((i=0; i<2; i++))", "for i in $A", 'for i in "$@"'),
                *('for i in "${ARR[@]}"', 'for k in "${!D[@]}"', "for i in data/*", "for i in $(seq 2)", "for A in x 'y z' *.none"),
            )
        )
        return f"{header}; do\n{self._body(depth)}\ndone"

    def _while(self, depth: int) -> str:
        self.loops += 1
        name = f"w{self.loops}"
        header = self.random.choice((f"while [ ${name} -lt 2 ]", f"until (( {name} >= 2 ))", f"while (({name}<1))", "while true"))
        start = "break" if "true" in header else f"{name}=$(({name}+1))"
        body = self._body(depth)
        return f"{name}=0\n{header}; do\n" + (f"{body}\n{start}" if start == "break" else f"{start}\n{body}") + "\ndone"

    def _group(self, depth: int) -> str:
        body = self._body(depth)
        forms = (f"{{\n{body}\n}}", f"(\n{body}\n)", f"g() {{\n{body}\n}}\ng {self._name()} 2", f"{{\n{body}\n}} >/dev/null 2>&1")
        return self.random.choice((*forms, f"g() {{\nlocal BS=1\n{body}\n}}\ng"))

    def _call(self) -> str:
        words = [self._word() for _ in range(self.random.randint(1, 4))]
        separator = self.random.choice((" ", " ", " \\\n  "))
        return self.random.choice(CALLS).replace(" W", f" {separator.join(words)}", 1)

    def _word(self) -> str:
        if self.random.random() < 0.35:
            return self.random.choice(WORDS)
        return f"data.{self.random.choice('abcde')}{self.random.randint(0, 9)}={self._value()}"
