"""A local endpoint with the OpenAI chat protocol and replies of a test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Endpoint:
    """A stand-in that answers each prompt with what `reply` makes of it: a text, raw bytes, or (state, body)."""

    reply: Callable[[str], str | bytes | tuple[int, bytes]]
    seen: list[dict] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    together: int = 0
    most_together: int = 0


@contextmanager
def endpoint(reply: Callable[[str], str | bytes | tuple[int, bytes]]) -> Iterator[Endpoint]:
    known, lock = Endpoint(reply), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                known.seen.append(asked)
                known.headers.append(dict(self.headers))
                known.together += 1
                known.most_together = max(known.most_together, known.together)
            reply_body = known.reply(asked["messages"][0]["content"])
            with lock:
                known.together -= 1
            if isinstance(reply_body, str):
                reply_body = json.dumps(
                    {"choices": [{"message": {"role": "assistant", "content": reply_body}}]}
                ).encode()
            state, body = reply_body if isinstance(reply_body, tuple) else (200, reply_body)
            self.send_response(state)
            self.send_header("Content-Length", str(len(body)))
            if state == 302:
                self.send_header("Location", known.url + "/elsewhere")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Somebody who asked has gone: that is what some tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    known.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
