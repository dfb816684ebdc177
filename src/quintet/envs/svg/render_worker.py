"""Worker process that renders SVG code: reads `{"svg": text, "size": pixels}` as JSON lines and sends a line per image.

Forked by `quintet.sandbox.forkserver`. It can open no file and no connection; memory and the CPU time of each image are
limited, and a process that exceeds them dies. Replies: `{"ready": true}` or `{"broken": error}` once, then
`{"pixels": RGB bytes}`, or `{"invalid": reason}` for code that is not rendered.
"""

from __future__ import annotations

import io
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from quintet.envs.svg.document_check import InvalidSvgError, check_document
from quintet.sandbox import seccomp
from quintet.sandbox.sandboxed_process import serve

MEMORY_BYTES: Final = 1 << 30
"""Address space limit of a process."""
CPU_SECONDS: Final = 2.0
"""CPU time of one image."""
WHITE: Final = (255, 255, 255)


def preload() -> None:
    """Load before forking everything that rendering needs: afterwards no file can be opened."""
    render("<svg width='1' height='1'><rect width='1' height='1' fill='red'/></svg>", 8)


def work(connection: socket.socket, setup: Mapping[str, Any]) -> None:
    """Render until the connection ends."""
    serve(connection, _prepare)


def _prepare() -> Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]]:
    """Limit memory, and confine this process where the system can; elsewhere only the document check protects."""
    preload()
    seccomp.die_first_without_memory()
    seccomp.limit_resources(MEMORY_BYTES)
    seccomp.limit_threads()
    with suppress(seccomp.ConfinementError):
        seccomp.confine(read_files=False)
    return lambda request: [_reply(request)]


def _reply(request: Mapping[str, Any]) -> Mapping[str, Any]:
    # the signal of this timer, which counts CPU time, ends the process also while compiled code runs
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        check_document(request["svg"])
        return {"pixels": render(request["svg"], request["size"])}
    except InvalidSvgError as error:
        return {"invalid": str(error)}
    except (MemoryError, RecursionError, ValueError) as error:
        return {"invalid": f"it cannot be rendered: {error or type(error).__name__}"[:200]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def render(svg: str, size: int) -> bytes:
    """Return the image of SVG code that has been checked, RGB `uint8[size, size, 3]`: as large as possible without
    distortion, centred on white.

    Raises:
        ValueError: it cannot be rendered.
    """
    import resvg_py
    from PIL import Image

    png: bytes = resvg_py.svg_to_bytes(
        svg_string=svg, width=size, height=size, background="white", skip_system_fonts=True
    )
    image = Image.open(io.BytesIO(png), formats=["PNG"])
    canvas = Image.new("RGB", (size, size), WHITE)
    canvas.paste(image.convert("RGB"), ((size - image.width) // 2, (size - image.height) // 2))
    pixels: bytes = canvas.tobytes()
    return pixels
