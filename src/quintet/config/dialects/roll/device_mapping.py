"""Parser of ROLL's `device_mapping`, which is Python source: parsed, never executed."""

from __future__ import annotations

import ast

MAX_DEVICES = 1 << 16


def parse_device_mapping(text: str) -> tuple[int, ...]:
    """Return the device numbers of a mapping: lists, `list(range(…))`, or sums of them.

    >>> parse_device_mapping("list(range(0,4)) + [6, 7]")
    (0, 1, 2, 3, 6, 7)

    Raises:
        ValueError: the text is anything else, or has a negative or repeated device, or none.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} must be a list, list(range(…)), or a sum of these") from None
    devices = _devices(tree, text)
    if not devices or len(set(devices)) != len(devices) or min(devices) < 0:
        raise ValueError(f"{text!r} must name devices from 0, each once")
    return devices


def _devices(node: ast.expr, text: str) -> tuple[int, ...]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _devices(node.left, text) + _devices(node.right, text)
    if isinstance(node, ast.List):
        return tuple(_number(item, text) for item in node.elts)
    if _is_call(node, "list", 1) and _is_call(node.args[0], "range", 3):  # type: ignore[attr-defined]
        bounds = [_number(bound, text) for bound in node.args[0].args]  # type: ignore[attr-defined]
        if len(bounds) == 3 and bounds[2] == 0:
            raise ValueError(f"{text!r}: the step of a range cannot be 0")
        devices = range(*bounds)
        if len(devices) > MAX_DEVICES:
            raise ValueError(f"{text!r} names {len(devices)} devices")
        return tuple(devices)
    raise ValueError(f"{text!r} must be a list, list(range(…)), or a sum of these")


def _is_call(node: ast.expr, name: str, max_args: int) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == name
        and not node.keywords
        and 1 <= len(node.args) <= max_args
    )


def _number(node: ast.expr, text: str) -> int:
    sign, value = (-1, node.operand) if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else (1, node)
    if isinstance(value, ast.Constant) and isinstance(value.value, int) and not isinstance(value.value, bool):
        if value.value > MAX_DEVICES:
            raise ValueError(f"{text!r}: {value.value} exceeds the maximum of {MAX_DEVICES} devices")
        return sign * value.value
    raise ValueError(f"{text!r}: {ast.unparse(node)} is not an integer")
