"""An address of this machine that refuses, hangs or lets nobody in, in the place of a W&B server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Unauthorised(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b'{"errors": [{"message": "permission denied"}]}'
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def server(behaviour: str) -> Iterator[str]:
    """An address of this machine where nobody listens, nobody answers, or every key is refused."""
    if behaviour == "401":
        with ThreadingHTTPServer(("127.0.0.1", 0), Unauthorised) as http:
            threading.Thread(target=http.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{http.server_port}"
            http.shutdown()
        return
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if behaviour == "hangs":
            listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
