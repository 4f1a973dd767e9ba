"""MinT's queue status script by its shape: raw HTTP, an invented session, `Retry-After` and `X-Queue-*` on a 408.

`python mint_queue_status.py` with MINT_BASE_URL and MINT_API_KEY set; prints one JSON line.
"""

from __future__ import annotations

import json
import os
import time
import uuid

import httpx
from dotenv import load_dotenv

load_dotenv(".env")

TOKENS = 8


def main() -> None:
    base_url = os.environ["MINT_BASE_URL"].rstrip("/")
    client = httpx.Client(
        base_url=f"{base_url}/api/v1", headers={"X-API-Key": os.environ["MINT_API_KEY"]}, timeout=60.0
    )

    def post(path: str, body: dict) -> httpx.Response:
        return client.post(f"/{path}", json=body)

    session_id = f"queue-{uuid.uuid4().hex[:12]}"  # never created
    created = post(
        "create_model",
        {"session_id": session_id, "model_seq_id": 0, "base_model": "mint/tiny", "lora_config": {"rank": 8}},
    )
    created.raise_for_status()
    model_id = wait(post, created.json()["request_id"])[0]["model_id"]
    assert client.get("/healthz").json()["status"] == "ok"

    def submit(seq_id: int) -> str:
        """A pass over one datum; the request id."""
        tensor = {"dtype": "int64", "shape": [TOKENS]}
        row = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [40] * TOKENS}]},
            "loss_fn_inputs": {
                "target_tokens": {**tensor, "data": [50] * TOKENS},
                "weights": {**tensor, "data": [1.0] * TOKENS, "dtype": "float32"},
            },
        }
        content = {"data": [row], "loss_fn": "cross_entropy"}
        accepted = post("forward_backward", {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": content})
        accepted.raise_for_status()
        return str(accepted.json()["request_id"])

    second = submit(2)  # waits for its place in the order, so that the first long poll ends without a result
    first: list[str] = []
    result, statuses = wait(post, second, on_waiting=lambda: first or first.append(submit(1)))
    print(json.dumps({"session_id": session_id, "statuses": statuses, "loss": result["metrics"]["loss:sum"]}))


def wait(post, request_id: str, on_waiting=lambda: None) -> tuple[dict, list[dict]]:
    """The result, and what every 408 on the way said."""
    statuses = []
    while True:
        response = post("retrieve_future", {"request_id": request_id})
        if response.status_code != 408:
            response.raise_for_status()
            return response.json(), statuses
        body, headers = response.json(), response.headers
        statuses.append(
            {
                "retry_after": int(headers["Retry-After"]),
                "x_queue": {name: value for name, value in headers.items() if name.lower().startswith("x-queue")},
                "state": body.get("queue_state"),
                "depth": body.get("queue_depth"),
                "position": body.get("queue_position"),
                "estimated_wait_s": body.get("estimated_wait_s"),
            }
        )
        on_waiting()
        time.sleep(min(1.0, statuses[-1]["retry_after"]))


if __name__ == "__main__":
    main()
