"""A real vLLM on this machine's CPU, serving the bundled model with loras, in an environment of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
from ports import free_port

from tests.weights.vllm_environment import vllm_python

TINY = Path(__file__).parents[2] / "src" / "mint" / "models" / "tiny"

NAME = "mint/tiny"

START_S = 600.0


class VllmServer:
    """The process, which can be killed and started again at the same address."""

    def __init__(self, folder: Path, *options: str, model: Path = TINY) -> None:
        """`options` are those of `vllm serve`, beside the ones that every sampler needs."""
        self._folder = folder
        self._options = options
        self._model = model
        self._port = free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What it has written."""
        return (self._folder / "vllm.log").read_text(errors="replace")

    def start(self, *, wait: bool = True) -> None:
        """Starts it, and waits until it answers."""
        python = vllm_python()
        environment = {
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "HOME": str(self._folder),
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            *(str(python.parent / "vllm"), "serve", str(self._model), "--served-model-name", NAME),
            *("--host", "127.0.0.1", "--port", str(self._port), "--dtype", "float32", "--max-model-len", "512"),
            *("--enforce-eager", "--enable-lora", "--max-lora-rank", "32", "--max-loras", "4", "--max-cpu-loras", "32"),
            *("--max-num-seqs", "128", *self._options),
        ]
        with (self._folder / "vllm.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=self._folder
            )
        until = time.monotonic() + START_S
        while wait and not self.is_well():
            assert self._process.poll() is None and time.monotonic() < until, self.log[-3000:]
            time.sleep(0.5)

    def is_well(self) -> bool:
        """Whether it answers."""
        try:
            return httpx.get(f"{self.address}/health", timeout=5).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """Ends all its processes at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
