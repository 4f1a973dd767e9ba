"""The process beside the server that renders chat templates, within limits on memory and on the length of the text.

A template comes with a model, so it may be a stranger's program. It is rendered in jinja's sandbox: it cannot import,
read files, or reach the attributes of Python's objects. The server limits its time. Arguments: the socket, the bytes of
memory beyond what the process has when it starts, the characters. Knows no service, and loads no tokenizer.
"""

from __future__ import annotations

import json
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mint.server.child_process import READY
from mint.tokenizer.chat_template import render_conversation

MAX_ERROR_CHARACTERS = 500


def render(task: dict[str, Any], max_characters: int) -> dict[str, str]:
    """`{"text"}` for a conversation, else `{"error"}` or, for one that takes too much, `{"excess"}`, in words."""
    try:
        text = render_conversation(
            task["template"],
            task["conversation"],
            tools=task["tools"],
            add_generation_prompt=True,
            **task["variables"],
        )
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary: a template is a program from elsewhere and may raise anything
        return {"error": str(error)[:MAX_ERROR_CHARACTERS]}
    return {"text": text} if len(text) <= max_characters else {"excess": f"more than {max_characters:,} characters"}


def main(handle: int, max_memory_bytes: int, max_characters: int) -> None:
    """Works until the server ends."""
    limit = _address_space_bytes() + max_memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with Connection(handle) as connection:
        connection.send_bytes(READY)
        while True:
            try:
                try:
                    answer = json.dumps(render(json.loads(connection.recv_bytes()), max_characters)).encode()
                except MemoryError:
                    answer = json.dumps({"excess": f"more than {max_memory_bytes >> 20} MiB of memory"}).encode()
                connection.send_bytes(answer)
            except (EOFError, ConnectionError):
                return


def _address_space_bytes() -> int:
    statm = Path("/proc/self/statm")  # Linux; elsewhere the limit includes what the process itself takes
    return int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
