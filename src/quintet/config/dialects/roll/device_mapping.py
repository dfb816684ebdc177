"""Parser of ROLL's `device_mapping`, which is Python source: parsed, never executed."""

import ast

MAX_DEVICES = 1 << 16


def parse_device_mapping(text: str) -> tuple[int, ...]:
    """Return the device numbers of a mapping: lists, `list([…])`, `list(range(…))`, or sums of them.

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
    match node:
        case ast.BinOp(left, ast.Add(), right):
            return _devices(left, text) + _devices(right, text)
        case ast.List(items):
            return tuple(_number(item, text) for item in items)
        case ast.Call(ast.Name("list"), [ast.List() as items], []):
            return _devices(items, text)
        case ast.Call(ast.Name("list"), [ast.Call(ast.Name("range"), [_, *_] as bounds, [])], []) if len(bounds) <= 3:
            return _range([_number(bound, text) for bound in bounds], text)
    raise ValueError(f"{text!r} must be a list, list(range(…)), or a sum of these")


def _range(bounds: list[int], text: str) -> tuple[int, ...]:
    if bounds[2:] == [0]:
        raise ValueError(f"{text!r}: the step of a range cannot be 0")
    devices = range(*bounds)
    if len(devices) > MAX_DEVICES:
        raise ValueError(f"{text!r} names {len(devices)} devices")
    return tuple(devices)


def _number(node: ast.expr, text: str) -> int:
    try:
        number = ast.literal_eval(node)
    except (ValueError, TypeError):
        number = None
    if type(number) is not int:
        raise ValueError(f"{text!r}: {ast.unparse(node)} is not an integer")
    if abs(number) > MAX_DEVICES:
        raise ValueError(f"{text!r}: {number} exceeds the maximum of {MAX_DEVICES} devices")
    return number
