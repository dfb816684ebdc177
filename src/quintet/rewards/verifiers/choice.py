"""Multiple choice: the letter, or the text, of the choice that a response ends with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from quintet.rewards.answer_extraction import extract_boxed, extract_tagged
from quintet.rewards.score import WRONG, Score, binary_score
from quintet.rewards.thoughts import text_after_thoughts
from quintet.rewards.verifiers.choice_texts import DEFAULT_LETTERS, Choices, comparable, plain_text, true_letters

NO_CHOICE: Final = ""
"""Reading of an answer that names several choices, or a letter that no choice has."""
MAX_MARKED: Final = 16
"""Number of boxes, and of answer tags, that are read."""

_BOX = re.compile(r"\\(?:boxed|fbox)\b")
_TAG = re.compile("<answer>")
_LEADING = re.compile(
    r"(?:[\s:\"'“‘«<>→•.#∴✅✓✔]|[=–—-]\s|\d{1,2}[.)]\s+(?=[(\[]?[A-Za-z][)\].]*\s*$)"
    r"|not\s+(?:option\s+)?[(\[]?[A-Z][)\]]?,?\s+but\s+(?:rather\s+)?)+"
)
_NAMES = re.compile(
    r"(?:(?:the|my|final|correct|right|best|answer|option|choice|letter|alternative|statement|is|be|ist|es|est"
    r"|la|el|opción|respuesta|réponse|选项|選項|therefore"
    r"|thus|definitely|clearly|certainly|obviously|simply|surely|indeed|actually|probably|likely|most|either|still)"
    r"(?!\w)[\s:\"'“‘]*)+",
    re.I,
)
_LABEL = re.compile(r"([(\[]?)\s*([A-Za-z])(?:\s*([)\]])|(?!\w|['’]\w))")
_AFTER_LABEL = re.compile(
    r"[\"'”’»>]*\s*(?:$|\?+\s*$|\.(?:\W|$|[A-Z])|[:)\]](?:\W|$|[A-Z0-9])|[,;!。、\n—–]|→|[-=]>|\s-\s)|-\s|[\"”»>]|\s+[(\[]"
    r"|\s+(?:because|since|as|for|due|which)\b|\s*[✅✓✔]|\s+(?:选项|選項|项|項|才?是?正[确確]|で|だ|が|입니다)(?!.*[吗嗎か]\W*$)"
)
_VERB = r"(?:is|was|are|were|has|had|would|could|can|cannot|may|might|seems?|looks?|does|must|should|becomes|equals)"
_IS_WRONG = (
    rf"\s+{_VERB}(?:n['’]t)?\s+(?:\w+\s+)?"
    r"(?:not|wrong|incorrect|false|too|out|impossible|invalid|eliminated|excluded)\b"
)
_REFUTED = re.compile(
    rf"[)\]]?(?:{_IS_WRONG}|\s+(?:is|was|does|can|could|would)n['’]t\b|\s+cannot\b|\s+can['’]t\b"
    r"|\s+(?:选项|選項)?\s*(?:是|也|都|显然)?(?:错|錯|不|误)|\s+\w{0,8}[吗嗎])",
    re.IGNORECASE,
)
_AFTER_NOUN = re.compile(rf"\s+(?!(?:{_VERB}|in|on|of|to)\b)\w")
_SEVERAL = re.compile(
    r"[\s.:]*(?:(?:,\s*)?\b(?:or|and|oder|und)\b|和|或者?|与|與|及|と|또는|[/&+–-]|[,;](?!\s*[(\[]?\w[)\]]?\s+(?:is|was)\b))"
    rf"\s*(?:option|choice)?\s*(?![(\[]?\w[)\]]?{_IS_WRONG})"
    r"(?:[(\[]\s*([A-Za-z])\s*[)\]]|((?-i:[A-Z]))(?![\w'’]|\s+[a-z]{3,}\s+[a-z])|([a-z])(?=\W*$))",
    re.I,
)
_MENTION = re.compile(r"\b(?:option|choice)\s*[(\[]?([A-Za-z])(?![\w'’])|[(\[]([A-Za-z])[)\]]", re.I)
_DENIED = re.compile(
    r"(?:\b(?:not|never|neither|nor|than|instead of|except|but|unlike|without|eliminates?|excludes?|rejects?"
    r"|rules? out)|n['’]t)(?:\s+(?:be|the|answer|option|choice))*[\s(\[]*$",
    re.I,
)
_DENIAL = re.compile(r"\b(?:not|no|never|neither|nor|cannot|wrong|incorrect|false|if|whether)\b|n['’]t\b", re.I)
_STATEMENT = re.compile(
    r"(?:\b(?:answer|solution|option|choice|letter|antwort|respuesta|réponse|resposta|risposta|ответ)\b"
    r"(?:\s+(?:correcta|correcte|corretta|correta))?(?:\s+(?:to|for|of)\s[^.\n:]{1,60}?)?(?:\s*\([^()\n]{2,30}\))?[\"'”’\])]*\s*"
    r"(?:(?:\bis\b|\bist\b|\blautet\b|\bes\b|\best\b|\bè\b|\bé\b)|\b(?:would|should|must|has to|can only) be\b"
    r"|[:=]|→|->|-\s|[—–]|\n)"
    r"|\banswer\s*(?=[(\[][A-Za-z][)\]])|\bans\b\s*[.:=]|\b(?:correct|right|conclusion|response)\s*:"
    r"|答案\s*(?:】|(?:应该|应当|应|就)?\s*(?:是|为|為|选|選|:))|[选選](?:择|擇)?\s*:?\s*(?=[A-Za-z(])"
    r"|(?<!不)正[确確](?:的)?(?:选项|選項|说法|一项)?\s*(?:是|为|為|:)|(?:答え|正解)\s*(?:は|:)|(?:정답|답)\s*(?:은|:)"
    r"|\bI(?:['’]d|\s+would|\s+will)?\s+(?:choose|chose|pick|select|take|say|go\s+with)\b|\bgoing\s+with\b)",
    re.I,
)
_HYPOTHESIS = re.compile(
    r"(?:\b(?:if|whether|suppose|assuming|why|unless|wrong|incorrect|false|not)|n['’]t)\s+(?:that\s+)?"
    r"(?:(?:the|an?|my)\s+)?(?:final\s+|correct\s+|right\s+|best\s+)?$",
    re.I,
)
_ASSERTED = re.compile(
    r"(?<![\w'’])[(\[]?([A-Z])[)\]]?\s+(?:is|would be|must be|should be|seems(?: to be)?|appears to be)\s+"
    r"(?:therefore\s+|thus\s+)?(?:the\s+)?(?:only\s+)?(?:correct|right|best|true|answer)\b"
)
_ASSERTED_CHINESE = re.compile(
    r"(?<![A-Za-z])([A-Z])\s*(?:选项|選項)?\s*(?:才)?\s*(?:是|为|為)?\s*(?:正[确確]|对的|對的)(?!吗|嗎)"
)
_CONCLUDED = re.compile(
    r"(?:\b(?:is|be|pick|hence|thus|so|therefore)|it['’]s|=>|→)[,:]?\s+[(\[]?((?-i:[A-Z]))[)\]]?[.!。]*$", re.I
)
_WRONG_NAME = re.compile(
    r"\b(?:wrong|incorrect|false)\s+(?:answer|option|choice|one)\s+(?:is|would be)\s*[(\[]*$", re.I
)


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Score 1 for the right letter, or for the text of its choice.

    The first that names a choice decides: the last box, the last `<answer>`, the line after `####`, the last statement
    such as "the answer is D", and the whole text after thoughts.

    Raises:
        GroundTruthError: the ground truth names no choice.
    """
    choices = Choices.of_row(extra)
    correct = true_letters(ground_truth, choices)
    letter = find_letter(text, choices, correct)
    return binary_score(letter in correct, choices.label_of(letter)) if letter else Score(WRONG)


def find_letter(text: str, choices: Choices, known: set[str]) -> str | None:
    """Return the letter that a response ends with; None if it names no choice, or several. Without `choices`, a letter
    from A to J counts, and those `known`."""
    letters = frozenset(choices.texts) or frozenset(DEFAULT_LETTERS) | known
    reader = _Reader(choices, letters)
    final = choices.read_numbers(text_after_thoughts(text))
    return next((letter for letter in reader.readings(final) if letter is not None), None) or None


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads letters; a reading is a letter, `NO_CHOICE`, or None if a text does not name a choice."""

    choices: Choices
    letters: frozenset[str]

    def readings(self, text: str) -> Iterator[str | None]:
        """Yield a reading of each place that an answer may have, the decisive one first."""
        yield from map(self.read, _marked_answers(text))
        plain = plain_text(text)
        for match in reversed(list(_STATEMENT.finditer(plain))):
            if not _HYPOTHESIS.search(plain[max(0, match.start() - 40) : match.start()]):
                yield self.read(_line_at(plain, match.end()))
        asserted = [*_ASSERTED.findall(plain), *_ASSERTED_CHINESE.findall(plain)]
        asserted = [letter for letter in asserted if letter in self.letters]
        yield asserted[-1] if asserted else None
        yield self._read_whole(plain)

    def read(self, text: str) -> str | None:
        """Return the reading of a short answer, such as `B`, `(b)`, `B. Paris`, `option B`, or the text of a choice."""
        answer = _without_start(_LEADING, plain_text(text))
        if (letter := self.choices.letter_of(answer)) is not None:
            return letter
        answer = _without_start(_LEADING, _without_start(_NAMES, answer))
        if re.fullmatch(r"[A-Z]{2,10}", answer) and self.letters.issuperset(answer):
            return NO_CHOICE
        label = _LABEL.match(answer)
        if label is None or not self._is_label(answer, label):
            return self._read_mentions(answer)
        letter, rest = label[2].upper(), answer[label.end() :]
        if letter not in self.letters:
            return NO_CHOICE if label[2].isupper() and not rest.strip(" .)]") else None
        return NO_CHOICE if self._names_another(letter, rest) else letter

    def _is_label(self, answer: str, label: re.Match[str]) -> bool:
        """Return whether a leading letter is a label rather than a word, such as an article, or a variable."""
        opening, sign, closing = label.groups()
        rest = answer[label.end() :]
        if (opening and not closing) or _REFUTED.match(rest):
            return False
        if closing or self._names_another(sign.upper(), rest) or _AFTER_LABEL.match(rest):
            return True
        return sign.isupper() and sign not in "AI" and _AFTER_NOUN.match(rest) is not None

    def _names_another(self, letter: str, rest: str) -> bool:
        match = _SEVERAL.match(rest)
        other = next(filter(None, match.groups())).upper() if match else letter
        return other != letter and other in self.letters

    def _read_mentions(self, text: str) -> str | None:
        """Return the only choice that a text mentions as `(B)` or `option B` without denying it."""
        named = {
            next(filter(None, match.groups())).upper()
            for match in _MENTION.finditer(text)
            if not (
                _DENIED.search(text[max(0, match.start() - 40) : match.start()]) or _REFUTED.match(text, match.end())
            )
        } & self.letters
        return None if not named else NO_CHOICE if len(named) > 1 else named.pop()

    def _read_whole(self, text: str) -> str | None:
        """Return the reading of the last line if it is a letter; of a text that begins with a letter, unless it lists
        the choices; or of the choice that it mentions or concludes with."""
        lines = [line for line in (_without_start(_LEADING, line) for line in text.splitlines()) if line.strip()]
        if not lines:
            return None
        starts = [
            self.read(line) if (label := _LABEL.match(line)) and self._is_label(line, label) else None for line in lines
        ]
        labels = "".join(filter(None, starts))
        lists_choices = labels.startswith("AB")
        is_all_list = lists_choices and DEFAULT_LETTERS.startswith(labels)
        if starts[-1] is not None and len(lines[-1].strip()) <= len("(A).") and not is_all_list:
            return starts[-1]
        if not lists_choices and starts[0] is not None:
            return starts[0]
        if (letter := self.choices.letter_of(lines[-1])) is not None:
            return letter
        if (letter := self._read_conclusion(lines[-1])) is not None:
            return letter
        letter = self._read_mentions(lines[-1]) if lists_choices else self._read_mentions(text)
        return self._read_text(lines[-1]) if letter is None else letter

    def _read_text(self, line: str) -> str | None:
        """Return the choice whose text ends a line such as `The capital is Paris.`, if the line has no other's text."""
        sentence = comparable(line)
        ends = {
            letter: [match.end() for match in re.finditer(rf"(?<!\w){re.escape(known)}(?!\w)", sentence)]
            for letter, text in self.choices.texts.items()
            if (known := comparable(text))
        }
        named = [letter for letter, positions in ends.items() if positions]
        if len(named) != 1 or ends[named[0]][-1] != len(sentence):
            return None
        before = sentence[: -len(comparable(self.choices.texts[named[0]]))]
        is_stated = re.search(r"\b(?:is|are|was|were|be)(?:\s+(?:the|an?))?\s+$", before)
        return named[0] if is_stated and not _DENIAL.search(before) else None

    def _read_conclusion(self, line: str) -> str | None:
        """Return the letter of a line such as `So it must be D.`"""
        match = _CONCLUDED.search(line)
        if match is None or match[1] not in self.letters:
            return None
        before = line[: match.start(1)]
        is_denied = _DENIED.search(before) or _DENIED.search(line[: match.start()]) or _WRONG_NAME.search(before)
        return None if is_denied else match[1]


def _without_start(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.match(text)
    return text[match.end() :].lstrip() if match else text


def _marked_answers(text: str) -> Iterator[str]:
    """Yield the contents of boxes and of `<answer>`, the last ones first, and the line after the last `####`."""
    yield from islice(_last_first(text, extract_boxed, _BOX), MAX_MARKED)
    yield from islice(_last_first(text, extract_tagged, _TAG), MAX_MARKED)
    _, hashes, rest = text.rpartition("####")
    if hashes:
        yield _line_at(rest, 0)


def _last_first(text: str, extract: Callable[[str], str | None], start: re.Pattern[str]) -> Iterator[str]:
    """Yield the contents that `extract` finds, from the last to the first."""
    for match in reversed(list(start.finditer(text))):
        if (content := extract(text)) is None:
            return
        yield content
        text = text[: match.start()]


def _line_at(text: str, start: int) -> str:
    """Return the rest of a line, or else the next line that is not empty."""
    return text[start:].lstrip(": \t\r\n").partition("\n")[0]
