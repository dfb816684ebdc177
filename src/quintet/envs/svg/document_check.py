"""Limits on SVG code before it is rendered: size, depth, elements, references; nothing outside of the document.

The code is parsed by expat without DTDs, so there are no entities. Elements and references that a renderer could expand
are counted as often as they would be drawn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from xml.parsers import expat

MAX_CHARS: Final = 65_536
MAX_DEPTH: Final = 64
"""Nested elements, including those that references insert."""
MAX_ELEMENTS: Final = 2_000
MAX_DRAWN: Final = 20_000
"""Elements after all references are expanded."""
MAX_NUMBER: Final = 1e6
"""Numbers in sizes and positions of the document."""

SVG_NAMESPACE = "http://www.w3.org/2000/svg"
SHAPES = {"path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "text", "tspan", "textPath"}
CONTAINERS = {"svg", "g", "a", "defs", "symbol", "switch", "use", "clipPath", "mask", "pattern", "marker"}
PAINT = {"linearGradient", "radialGradient", "stop"}
DESCRIPTIONS = {"title", "desc", "metadata", "style"}
FILTERS = {
    *("filter", "feBlend", "feColorMatrix", "feComponentTransfer", "feComposite", "feDropShadow", "feFlood"),
    *("feFuncA", "feFuncB", "feFuncG", "feFuncR", "feGaussianBlur", "feMerge", "feMergeNode", "feOffset"),
}
"""Filters whose time does not depend on their parameters."""
ALLOWED = SHAPES | CONTAINERS | PAINT | DESCRIPTIONS | FILTERS

_URL = re.compile(r"url\s*\(", re.IGNORECASE)
_LOCAL_URL = re.compile(r"url\s*\(\s*[\"']?#([^\"')\s]+)[\"']?\s*\)", re.IGNORECASE)
_STYLE_SHEET = re.compile(r"@|\\|url\s*\(|expression\s*\(|javascript:|image-set\s*\(|src\s*\(", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", re.IGNORECASE)
_NOT_A_NUMBER = re.compile(r"\b(?:nan|inf|infinity)\b", re.IGNORECASE)
SIZES = ("width", "height", "viewBox", "x", "y", "stdDeviation", "transform", "gradientTransform", "patternTransform")
"""Attributes whose numbers are checked; renderers clip shapes, but these decide about the size of buffers."""


class InvalidSvgError(ValueError):
    """SVG code that is not rendered; the message gives the reason."""


@dataclass(slots=True)
class _Element:
    """Element with its children and the ids that it refers to."""

    references: list[str] = field(default_factory=list)
    children: list[_Element] = field(default_factory=list)


def check_document(text: str) -> None:
    """Check SVG code.

    Raises:
        InvalidSvgError: it is no SVG document, exceeds a limit, or refers to something outside of itself.
    """
    if not text:
        raise InvalidSvgError("there is no <svg> element")
    if len(text) > MAX_CHARS:
        raise InvalidSvgError(f"it has more than {MAX_CHARS} characters")
    reader = _Reader()
    parser = expat.ParserCreate("utf-8", namespace_separator=" ")
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.end
    parser.CharacterDataHandler = reader.characters
    parser.StartDoctypeDeclHandler = _refuse_doctype
    parser.EntityDeclHandler = _refuse_doctype
    parser.ProcessingInstructionHandler = _refuse_instruction
    try:
        parser.Parse(text.encode("utf-8", "replace"), True)
    except expat.ExpatError as error:
        raise InvalidSvgError(f"no valid XML: {error}") from None
    _count_drawn(reader.root, reader.by_id, {}, set(), 0)


def _refuse_doctype(*_: object) -> None:
    raise InvalidSvgError("a DOCTYPE is not allowed")


def _refuse_instruction(*_: object) -> None:
    raise InvalidSvgError("processing instructions are not allowed")


class _Reader:
    """Handlers of the parser, which build the tree of references."""

    def __init__(self) -> None:
        self.root = _Element()
        self.by_id: dict[str, _Element] = {}
        self._open = [self.root]
        self._num_elements = 0
        self._style: list[str] | None = None
        """Text of the style sheet that is open."""

    def start(self, qualified_name: str, attributes: Mapping[str, str]) -> None:
        self._num_elements += 1
        if self._num_elements > MAX_ELEMENTS:
            raise InvalidSvgError(f"it has more than {MAX_ELEMENTS} elements")
        if len(self._open) > MAX_DEPTH:
            raise InvalidSvgError(f"elements are nested more than {MAX_DEPTH} deep")
        if self._style is not None:
            raise InvalidSvgError("a <style> may contain only text")
        namespace, _, name = qualified_name.rpartition(" ")
        if self._num_elements == 1 and name != "svg":
            raise InvalidSvgError(f"its root is <{name:.40}>, not <svg>")
        # renderers ignore elements of other namespaces, such as the metadata of editors
        if namespace in ("", SVG_NAMESPACE) and name not in ALLOWED:
            raise InvalidSvgError(f"<{name:.40}> is not allowed")
        element = _Element()
        for qualified, value in attributes.items():
            attribute = qualified.rpartition(" ")[2]
            element.references += _references(attribute, value)
            if attribute == "id":
                self.by_id.setdefault(value, element)
        self._open[-1].children.append(element)
        self._open.append(element)
        self._style = [] if name == "style" else None

    def end(self, _: str) -> None:
        self._open.pop()
        if self._style is not None and _STYLE_SHEET.search("".join(self._style)):
            raise InvalidSvgError("a style sheet may not have url(), @-rules or escapes")
        self._style = None

    def characters(self, text: str) -> None:
        if self._style is not None:
            self._style.append(text)


def _references(attribute: str, value: str) -> list[str]:
    """Return the ids that an attribute refers to.

    Raises:
        InvalidSvgError: the attribute is not allowed, or refers to something outside of the document.
    """
    if attribute.lower().startswith("on"):
        raise InvalidSvgError(f"the event handler {attribute:.40} is not allowed")
    if attribute in SIZES:
        _check_numbers(attribute, value)
    if attribute.lower() in ("href", "src", "base"):
        if not value.strip().startswith("#"):
            raise InvalidSvgError(f"{attribute} refers to something outside of the document: {value:.40}")
        return [value.strip()[1:]]
    if attribute == "style" and _STYLE_SHEET.search(_LOCAL_URL.sub("", value)):
        raise InvalidSvgError("a style may not have external url(), @-rules or escapes")
    local = _LOCAL_URL.findall(value)
    if len(local) < len(_URL.findall(value)):
        raise InvalidSvgError(f"{attribute} refers to something outside of the document: {value:.40}")
    return local


def _check_numbers(attribute: str, value: str) -> None:
    if _NOT_A_NUMBER.search(value):
        raise InvalidSvgError(f"{attribute}={value:.40} is not a number")
    numbers = [abs(float(number)) for number in _NUMBER.findall(value)]
    if any(not math.isfinite(number) or number > MAX_NUMBER for number in numbers):
        raise InvalidSvgError(f"{attribute}={value:.40} has a number above {MAX_NUMBER:g}")


def _count_drawn(
    element: _Element, by_id: Mapping[str, _Element], counts: dict[int, int], running: set[int], depth: int
) -> int:
    """Return the number of elements that are drawn for an element. A referenced element counts for each descendant,
    which may inherit the reference.

    Raises:
        InvalidSvgError: there are too many, or references are circular or nested too deeply.
    """
    key = id(element)
    if key in counts:
        return counts[key]
    if key in running:
        raise InvalidSvgError("its references are circular")
    if depth > MAX_DEPTH:
        raise InvalidSvgError(f"elements and references are nested more than {MAX_DEPTH} deep")
    running.add(key)
    content = 1 + sum(_count_drawn(child, by_id, counts, running, depth + 1) for child in element.children)
    targets = [by_id[name] for name in element.references if name in by_id]
    counts[key] = content * (1 + sum(_count_drawn(target, by_id, counts, running, depth + 1) for target in targets))
    if counts[key] > MAX_DRAWN:
        raise InvalidSvgError(f"its references draw more than {MAX_DRAWN} elements")
    running.discard(key)
    return counts[key]
