"""An install without numpy: a client of a server trains and samples, and what needs numpy says so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from default_engine import fake_engine
from http_server import http_server

from mint.types.training import ForwardBackwardOutput

HIDE_NUMPY = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numpy", "torch", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""
CLIENT = """
import json, sys
import mint
from mint.types import Datum, ModelInput, SamplingParams, TensorData

WEIGHTS = TensorData([1, 1, 0], "float32")
with mint.ServiceClient(base_url=sys.argv[1]) as service:
    trainer = service.create_lora_training_client("mint/tiny", rank=4, seed=1)
    data = [
        Datum(ModelInput.from_ints([5, 6, 7, 8]), {"target_tokens": [6, 7, 8, 9], "weights": [0, 1.5, 1, 1]}),
        Datum(ModelInput.from_ints(range(1, 4)), {"target_tokens": (2, 3, 4), "weights": WEIGHTS}),
    ]
    trained = trainer.forward_backward(data, "cross_entropy").result()
    stepped = trainer.optim_step(mint.AdamParams(learning_rate=0.1)).result()
    sampler = trainer.save_weights_and_get_sampling_client()
    samples = sampler.sample(
        ModelInput.from_ints([1, 2, 3]), 2, SamplingParams(max_tokens=5, seed=3),
        include_prompt_logprobs=True, topk_prompt_logprobs=2,
    ).result()
for sequence in samples.sequences:
    sequence.sequence_id = None  # names the session
print(json.dumps({
    "trained": trained.model_dump_json(), "stepped": stepped.model_dump_json(), "samples": samples.model_dump_json(),
    "numpy": "numpy" in sys.modules, "tokens": samples.sequences[0].tokens_np.tolist(),
}))
"""


def run(code: str, *arguments: str, hide: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-c", (HIDE_NUMPY if hide else "") + code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "MINT_API_KEY": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_client_without_numpy_gets_what_a_client_with_numpy_gets(tmp_path: Path) -> None:
    with http_server(tmp_path, engine=fake_engine()) as url:
        without, with_numpy = (json.loads(run(CLIENT, url, hide=hide)) for hide in (True, False))
    assert (without.pop("numpy"), with_numpy.pop("numpy")) == (False, True)
    assert without == with_numpy
    assert len(without["tokens"]) > 0
    outputs = ForwardBackwardOutput.model_validate_json(without["trained"]).loss_fn_outputs
    assert [len(output["logprobs"]) for output in outputs] == [4, 3]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import mint.rl", r"mint.rl needs the package numpy, which is not installed. pip install .*\[rl\]'"),
        (
            "import mint; mint.ServiceClient().session_id",
            r"needs the package numpy.* pip install .*\[local\]' to compute on this machine, or set MINT_BASE_URL",
        ),
        (
            "from mint.client.rest_client import RestClient; RestClient().list_sessions()",
            r"needs the package numpy.* pip install .*\[local\]' to compute on this machine, or set MINT_BASE_URL",
        ),
        (
            "from mint.types import TensorData; TensorData([1], 'int64').to_numpy()",
            "needs the package numpy, which is not installed. pip install numpy",
        ),
        (
            "from mint.types import ModelInput; ModelInput.from_ints([1]).to_numpy()",
            "needs the package numpy, which is not installed. pip install numpy",
        ),
    ],
)
def test_what_needs_numpy_says_what_to_install(code: str, message: str) -> None:
    check = f"import mint.errors\ntry:\n    {code}\nexcept mint.errors.MissingExtraError as error:\n    print(error)"
    assert re.search(message, run(check))


def test_messages_written_without_numpy_have_the_same_bytes() -> None:
    """Every field of the three messages, through protobuf and back."""
    code = """
import json
from wire_examples import OUTPUT, SAMPLE, SDK_REQUEST
from mint.wire import Encoding, decode, encode
from mint.wire.requests import ForwardBackwardRequest
for message in (OUTPUT, SAMPLE, decode(ForwardBackwardRequest, SDK_REQUEST, Encoding.PROTO)):
    raw = encode(message, Encoding.PROTO)
    assert decode(type(message), raw, Encoding.PROTO) == message, message
    print(raw.hex(), json.dumps(json.loads(message.model_dump_json()), sort_keys=True))
"""
    place = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1] / 'wire')!r})\n"
    assert run(place + code) == run(place + code, hide=False)


def mint(*words: str, home: Path, url: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"{HIDE_NUMPY}from mint.cli.main import app; app()", *words]
    environment = {**os.environ, "MINT_API_KEY": "", "MINT_HOME": str(home), **({"MINT_BASE_URL": url} if url else {})}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_command_of_this_machine_names_the_one_extra_that_suffices(tmp_path: Path) -> None:
    ended = mint("keys", "list", home=tmp_path)
    assert ended.returncode == 1
    assert "[local]'" in ended.stderr and "[rl]'" not in ended.stderr, ended.stderr


def test_the_models_of_a_server_are_listed_without_numpy(tmp_path: Path) -> None:
    with http_server(tmp_path, engine=fake_engine()) as url:
        run(CLIENT, url)
        ended = mint("runs", "list", "--json", home=tmp_path / "elsewhere", url=url)
    assert ended.returncode == 0, ended.stderr
    listed = json.loads(ended.stdout)
    assert len(listed["training_runs"]) == 1 and listed["rl_runs"] == []
