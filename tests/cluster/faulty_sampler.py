"""A sampler that fails as it is told: for faults that a real one cannot be made to show.

It speaks vLLM's protocol, has one model, and gives the token 5 with the logprob -0.5 again and again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "base"


class FaultySampler:
    """What it is to do wrong, and what it was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []  # the status and content of the next answers to `generate`
        self.refuses_loras = 0  # with this status
        self.delay_s = 0.0
        self.is_frozen = False
        self.has_ended = False
        self.breaks_off = 0  # so many answers
        self.loras: dict[str, str] = {}
        self.most_loras = 0
        self.generated: list[Mapping[str, Any]] = []
        self.cuts_to: int | None = None
        self.logprob: float | None = -0.5


@contextmanager
def faulty_sampler(port: int = 0) -> Iterator[tuple[str, FaultySampler]]:
    """Its address, and itself."""
    sampler = FaultySampler()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None: ...

        def do_GET(self) -> None:
            self._freeze()
            names = [MODEL, *sampler.loras]
            models = [{"id": name, "root": "/x", "parent": None if name == MODEL else MODEL} for name in names]
            self._send(200, {} if self.path == "/health" else {"data": models})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._freeze()
            if self.path == "/v1/load_lora_adapter":
                if sampler.refuses_loras:
                    self._send(sampler.refuses_loras, {"error": {"message": "no such lora"}})
                    return
                sampler.loras[body["lora_name"]] = body["lora_path"]
                sampler.most_loras = max(sampler.most_loras, len(sampler.loras))
                self._send(200, {})
            elif self.path == "/v1/unload_lora_adapter":
                sampler.loras.pop(body["lora_name"], None)
                self._send(200, {})
            else:
                self._generate(body)

        def _generate(self, body: Mapping[str, Any]) -> None:
            sampler.generated.append(body)
            time.sleep(sampler.delay_s)
            if sampler.breaks_off:
                sampler.breaks_off -= 1
                self.close_connection = True
                return
            if sampler.answers:
                self._send(*sampler.answers.pop(0))
                return
            if body["model"] not in (MODEL, *sampler.loras):
                self._send(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
                return
            params = body["sampling_params"]
            length = params["max_tokens"] if sampler.cuts_to is None else sampler.cuts_to
            content = [{"token_id": 5, "logprob": sampler.logprob}] * length
            choices = [
                {"index": i, "finish_reason": "length", "token_ids": [5] * length, "logprobs": {"content": content}}
                for i in range(params["n"])
            ]
            if not body.get("stream"):
                self._send(200, {"choices": choices})
                return
            lines = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices] + ["data: [DONE]\n\n"]
            self._send_bytes(200, "".join(lines).encode())

        def _freeze(self) -> None:
            while sampler.is_frozen:
                time.sleep(0.02)
            if sampler.has_ended:  # a connection that was open before
                raise ConnectionAbortedError

        def _send(self, status: int, content: Any) -> None:
            self._send_bytes(status, json.dumps(content).encode())

        def _send_bytes(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.handle_error = lambda request, client_address: None  # ty: ignore[invalid-assignment]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sampler
    finally:
        sampler.has_ended = True
        server.shutdown()
        server.server_close()
