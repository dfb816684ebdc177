"""Generator of small run scripts over the constructs that real scripts use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import yaml

from bash_scripts import TRAIN

CONSTRUCTS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("bash_constructs.yaml").read_text())


class ScriptGenerator:
    """Combines constructs into scripts."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.loops = 0

    def script(self) -> tuple[str, tuple[str, ...]]:
        """Return a script and its positional arguments."""
        choose = self.random
        names = CONSTRUCTS["names"] if choose.random() < 0.8 else choose.sample(CONSTRUCTS["names"], 3)
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
        return (
            template.replace("$V", f"${self._name()}")
            .replace("${V", "${" + self._name())
            .replace("{#V", "{#" + self._name())
            .replace("{!V", "{!" + self._name())
            .replace("$W", f"${self._name()}")
        )

    def _choice(self, kind: str) -> str:
        return self.random.choice(CONSTRUCTS[kind])

    def _name(self) -> str:
        return self._choice("names")

    def _value(self) -> str:
        choose = self.random
        kinds: Sequence[Callable[[], str]] = (
            lambda: self._choice("literals"),
            lambda: self._choice("quoted"),
            lambda: self._fill(self._choice("expansions")),
            lambda: f'"{self._fill(self._choice("expansions"))}"',
            lambda: f"$(({self._choice('arithmetic')}))",
            lambda: self._substitution(),
        )
        return choose.choices(kinds, (5, 4, 4, 3, 2, 2))[0]()

    def _substitution(self) -> str:
        text = f"$({self._fill(self._choice('substitutions'))})"
        return f'"{text}"' if self.random.random() < 0.4 else text

    def _test(self) -> str:
        return self._fill(self._choice("tests"))

    def _statement(self, depth: int) -> str:
        choose = self.random
        simple: Sequence[Callable[[], str]] = (
            lambda: f"{self._name()}={self._value()}",
            lambda: self._choice("statements"),
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
        ends = (*(";;",) * 40, ";&", ";;&")
        branches = [
            f"  {self._fill(self._choice('patterns'))}) {self._body(depth)} {self.random.choice(ends)}"
            for _ in range(self.random.randint(1, 3))
        ]
        word = self.random.choice((f"${self._name()}", f'"${self._name()}"', self._value()))
        return "\n".join([f"case {word} in", *branches, "esac"])

    def _for(self, depth: int) -> str:
        header = self.random.choice(
            (
                *(
                    "for i in 1 2",
                    "for BS in 1 2 3",
                    "for i in {1..3}",
                    "for ((i=0; i<2; i++))",
                    "for i in $A",
                    'for i in "$@"',
                ),
                *(
                    'for i in "${ARR[@]}"',
                    'for k in "${!D[@]}"',
                    "for i in data/*",
                    "for i in $(seq 2)",
                    "for A in x 'y z' *.none",
                ),
            )
        )
        return f"{header}; do\n{self._body(depth)}\ndone"

    def _while(self, depth: int) -> str:
        self.loops += 1
        name = f"w{self.loops}"
        header = self.random.choice(
            (f"while [ ${name} -lt 2 ]", f"until (( {name} >= 2 ))", f"while (({name}<1))", "while true")
        )
        start = "break" if "true" in header else f"{name}=$(({name}+1))"
        body = self._body(depth)
        return f"{name}=0\n{header}; do\n" + (f"{body}\n{start}" if start == "break" else f"{start}\n{body}") + "\ndone"

    def _group(self, depth: int) -> str:
        body = self._body(depth)
        forms = (
            f"{{\n{body}\n}}",
            f"(\n{body}\n)",
            f"g() {{\n{body}\n}}\ng {self._name()} 2",
            f"{{\n{body}\n}} >/dev/null 2>&1",
        )
        return self.random.choice((*forms, f"g() {{\nlocal BS=1\n{body}\n}}\ng"))

    def _call(self) -> str:
        words = [self._word() for _ in range(self.random.randint(1, 4))]
        separator = self.random.choice((" ", " ", " \\\n  "))
        return self._choice("calls").replace("TRAIN", TRAIN).replace(" W", f" {separator.join(words)}", 1)

    def _word(self) -> str:
        if self.random.random() < 0.35:
            return self._choice("words")
        return f"data.{self.random.choice('abcde')}{self.random.randint(0, 9)}={self._value()}"
