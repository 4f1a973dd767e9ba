"""SkyRL tx's side of `python -m benchmarks grpo`: its API server, and the Tinker SDK's loop against it.

Runs in SkyRL tx's own environment and imports nothing of mint, so the reward is defined here again. In the spec's
`settings`, `backend` is the configuration of the server's JAX backend, and `warm_up_steps` is the number of steps
before the first turn.

The server is started as its documentation says, in a process of its own, which starts its engine with `uv run`. CPU
seconds and memory are those of this process, the server and the engine together.

What XLA compiles depends on how many sample requests the engine finds at once, so it compiles again in many of the
first steps. Warm-up steps have a learning rate of 0: they compile and change nothing.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.answering import answer_turns, open_answers, read_spec

SERVER_START_S = 180.0

TYPED_DICTS = """\
import sys
if sys.version_info < (3, 12):
    import typing, typing_extensions
    typing.TypedDict = typing_extensions.TypedDict
"""
"""For the server's processes: pydantic refuses `typing.TypedDict` before Python 3.12, and SkyRL tx declares 3.11."""


class Processes:
    """This process and its descendants: how much CPU and memory they have used."""

    def cpu_s(self) -> float:
        """CPU seconds since they began."""
        ticks = 0
        for process in self._ids():
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def peak_rss_bytes(self) -> int:
        """The sum of the most that each has held at once."""
        lines = [line for process in self._ids() for line in (process / "status").read_text().splitlines()]
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

    def _ids(self) -> Iterator[Path]:
        """The process ids' folders in /proc; a child is listed under the thread that started it."""
        waiting = [str(os.getpid())]
        while waiting:
            process = Path("/proc") / waiting.pop()
            with suppress(OSError):  # threads and children may end while they are looked at
                for thread in (process / "task").iterdir():
                    waiting += (thread / "children").read_text().split()
                yield process


@contextmanager
def server(spec: dict[str, Any], folder: Path) -> Generator[str]:
    """SkyRL tx's server on a free port of this machine, with its data in `folder`: its address, once it answers."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(TYPED_DICTS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "--base-model": spec["base_model"],
        "--backend": "jax",
        "--backend-config": json.dumps(spec["settings"]["backend"]),
        "--database-url": f"sqlite:///{folder}/tinker.db",
        "--checkpoints-base": str(folder / "checkpoints"),
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    environment = {
        "PYTHONPATH": str(folder),
        "VIRTUAL_ENV": sys.prefix,  # what `uv run` takes its packages from
        "PATH": f"{sys.prefix}/bin:{os.defpath}",  # where `uv` is
        "JAX_PLATFORMS": "cpu",
        "NPROC": str(spec["threads"]),  # the size of XLA's pools of threads
    }
    command = [
        "env",
        *(f"{name}={value}" for name, value in environment.items()),
        sys.executable,
        "-m",
        "tx.tinker.api",
    ]
    command += [part for option in options.items() for part in option]
    process = subprocess.Popen(command, cwd=folder, stdout=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{url}/api/v1/healthz", process)
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + SERVER_START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=5)
        except OSError:
            time.sleep(0.2)
        else:
            return
    sys.exit(f"the server has not come up: exit code {process.poll()}")


class GrpoSide:
    """One training client of the Tinker SDK, and the loop around it."""

    def __init__(self, spec: dict[str, Any], base_url: str, began_s: float) -> None:
        import tinker  # ty: ignore[import-not-found]  # deferred, as the next: loaded while the server starts
        from transformers import AutoTokenizer

        self.spec, self.types = spec, tinker.types
        client = tinker.ServiceClient(base_url=base_url, api_key="tml-of-no-account")
        self.server_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        self.training = client.create_lora_training_client(
            base_model=spec["base_model"], rank=spec["rank"], seed=spec["seed"]
        )
        self.creation_s = time.perf_counter() - began_s
        self.tokenizer: Any = AutoTokenizer.from_pretrained(spec["base_model"])
        self.sampling_params = self.types.SamplingParams(max_tokens=spec["max_tokens"], temperature=1.0)

    def ready(self) -> dict[str, Any]:
        """Also how long the server, the model and the first step took."""
        probe_logprob, first_step_s = self.probe("before"), None
        for warm_up in range(self.spec["settings"]["warm_up_steps"]):
            began_s = time.perf_counter()
            self.make_step(0, name=f"warm-up-{warm_up}", learning_rate=0.0)
            first_step_s = first_step_s or time.perf_counter() - began_s
        return {
            "probe_logprob": probe_logprob,
            "trained_parameters": self.trained_parameters(),
            "dtype": "float32",
            "threads": self.spec["threads"],
            "server_start_s": self.server_s,
            "creation_s": self.creation_s,
            "first_step_s": first_step_s,
        }

    def step(self, index: int) -> dict[str, Any]:
        """Sample, reward, centre, train."""
        return self.make_step(index, name=f"grpo-{index}", learning_rate=self.spec["learning_rate"])

    def finished(self) -> dict[str, Any]:
        packages = ("skyrl-tx", "tinker", "jax", "flax", "transformers")
        return {
            "probe_logprob": self.probe("after"),
            "peak_rss_bytes": Processes().peak_rss_bytes(),
            "versions": {name: importlib.metadata.version(name) for name in packages},
        }

    def make_step(self, index: int, *, name: str, learning_rate: float) -> dict[str, Any]:
        """The step with the prompts of place `index`; the sampler's weights are saved as `name`."""
        began_s, part_ends_s = time.perf_counter(), {}
        first = index * self.spec["prompts_per_step"]
        texts = self.spec["prompts"][first : first + self.spec["prompts_per_step"]]
        sampler = self.training.save_weights_and_get_sampling_client(name=name)
        part_ends_s["save"] = time.perf_counter() - began_s
        prompts = [self.tokenizer.encode(text) for text in texts]
        futures = [
            sampler.sample(
                prompt=self.types.ModelInput.from_ints(prompt),
                num_samples=self.spec["group_size"],
                sampling_params=self.sampling_params,
            )
            for prompt in prompts
        ]
        groups = [future.result().sequences for future in futures]
        self.tokenizer.batch_decode([sequence.tokens for group in groups for sequence in group])
        part_ends_s["sample"] = time.perf_counter() - began_s
        datums = [datum for prompt, group in zip(prompts, groups, strict=True) for datum in self.datums(prompt, group)]
        trained = self.training.forward_backward(datums, loss_fn="importance_sampling")
        stepped = self.training.optim_step(
            self.types.AdamParams(learning_rate=learning_rate, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
        )
        trained.result()
        part_ends_s["forward_backward"] = time.perf_counter() - began_s
        stepped.result()
        part_ends_s["optim_step"] = time.perf_counter() - began_s
        lengths = [len(sequence.tokens) for group in groups for sequence in group]
        return {
            "sample_s": part_ends_s["sample"],
            "part_ends_s": part_ends_s,
            "completion_lengths": lengths,
            "tokens": sum(lengths),
        }

    def datums(self, prompt: list[int], group: list[Any]) -> list[Any]:
        """One datum for each sample of a group; the advantage is its centred reward over the tokens of the step."""
        rewards = [reward(sequence.tokens) for sequence in group]
        mean = sum(rewards) / len(rewards)
        tokens_per_step = self.spec["prompts_per_step"] * self.spec["group_size"] * self.spec["max_tokens"]
        prefix = [0.0] * (len(prompt) - 1)
        datums = []
        for sequence, value in zip(group, rewards, strict=True):
            full = [*prompt, *sequence.tokens]
            floats = {
                "weights": prefix + [1.0] * len(sequence.tokens),
                "logprobs": prefix + list(sequence.logprobs),
                "advantages": prefix + [(value - mean) / tokens_per_step] * len(sequence.tokens),
            }
            inputs = {name: self.types.TensorData(data=data, dtype="float32") for name, data in floats.items()}
            inputs["target_tokens"] = self.types.TensorData(data=full[1:], dtype="int64")
            model_input = self.types.ModelInput.from_ints(full[:-1])
            datums.append(self.types.Datum(model_input=model_input, loss_fn_inputs=inputs))
        return datums

    def probe(self, name: str) -> float:
        """The policy's logprob of a fixed sequence: shows that the base is the same, and that training changes it."""
        sampler = self.training.save_weights_and_get_sampling_client(name=f"probe-{name}")
        logprobs = sampler.compute_logprobs(self.types.ModelInput.from_ints(self.spec["probe_tokens"])).result()
        return sum(logprob for logprob in logprobs if logprob is not None)

    def trained_parameters(self) -> int:
        """Counted in an adapter that the server saves: in its memory, every slot has the largest rank."""
        from safetensors.numpy import load  # deferred: part of no step

        self.training.save_weights_for_sampler(name="counted").result()
        path = next((Path(self.spec["work_dir"]) / "checkpoints").rglob("counted.tar.gz"))
        with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as archive:
            members = [archive.extractfile(name) for name in archive.getnames() if name.endswith(".safetensors")]
            tensors = [load(member.read()) for member in members if member is not None]
        return sum(array.size for part in tensors for array in part.values())


def reward(tokens: list[int]) -> float:
    """The share of even token ids: as cheap as a reward can be, and different within a group."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def main() -> None:
    """Answers turns until told to finish."""
    answers, spec = open_answers(), read_spec()
    began_s = time.perf_counter()
    with server(spec, Path(spec["work_dir"])) as url:
        answer_turns(GrpoSide(spec, url, began_s), answers, Processes().cpu_s)


if __name__ == "__main__":
    main()
