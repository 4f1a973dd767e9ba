"""lm-eval, installed from the registry into an environment of its own, scores and generates over this endpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai_server import MODEL, Server
from own_environment import install

import mint
from mint.types import ModelInput

HARNESS = ("lm_eval[api]==0.4.13", "transformers>=5.17,<6")

SCORED = """\
task: mint_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GENERATED = """\
task: mint_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 24, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def questions() -> list[dict[str, Any]]:
    pairs = [(3, 4), (2, 2), (5, 1), (6, 7), (8, 0), (9, 9)]
    return [
        {"question": f"What is {a} + {b}? It is", "choices": [str(a + b), str(a + b + 1)], "answer": 0}
        for a, b in pairs
    ]


def logprob(sampler: mint.SamplingClient, tokenizer: Any, context: str, continuation: str) -> float:
    """What lm-eval calls the log-likelihood: of the continuation's tokens, after the context's."""
    whole = tokenizer.encode(context + continuation)
    start = len(tokenizer.encode(context))
    return sum(sampler.compute_logprobs(ModelInput.from_ints(whole)).result()[start:])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_lm_eval_scores_and_generates_as_the_sampling_client_does(server: Server, tmp_path: Path) -> None:
    programs = install(tmp_path / "venv", *HARNESS)
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in questions()))
    (tmp_path / "tasks").mkdir()
    for name, text in (("choice", SCORED), ("generate", GENERATED)):
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text.format(file=data))
    folder = Path(mint.__file__).parent / "models" / "tiny"
    model = f"base_url={server.url}/v1/completions,model={MODEL},tokenizer={folder},tokenizer_backend=huggingface"
    options = ["--model", "local-completions", "--model_args", f"{model},num_concurrent=4,max_length=1024"]
    options += ["--tasks", "mint_choice,mint_generate", "--include_path", str(tmp_path / "tasks")]
    options += ["--log_samples", "--output_path", str(tmp_path / "out")]
    environment = {
        "OPENAI_API_KEY": server.keys["ada"], "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"),
        "PATH": "/usr/bin:/bin",
    }  # fmt: skip
    harness = subprocess.run(
        [programs / "python", "-m", "lm_eval", *options], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert harness.returncode == 0, harness.stderr[-3000:]
    samples = {
        name: [json.loads(line) for file in (tmp_path / "out").rglob(f"samples_{name}_*.jsonl") for line in file.open()]
        for name in ("mint_choice", "mint_generate")
    }
    sampler = server.mint_client().create_sampling_client(base_model=MODEL)
    tokenizer = sampler.get_tokenizer()
    assert len(samples["mint_choice"]) == len(samples["mint_generate"]) == len(questions())
    for sample in samples["mint_choice"]:
        doc = sample["doc"]
        for (scored, _greedy), choice in zip(sample["filtered_resps"], doc["choices"], strict=True):
            own = logprob(sampler, tokenizer, doc["question"], f" {choice}")
            assert float(scored) == pytest.approx(own, abs=1e-4)
    with server.client() as client:
        for sample in samples["mint_generate"]:
            got = client.completions.create(
                model=MODEL, prompt=sample["doc"]["question"], max_tokens=24, temperature=0, stop=["."]
            )
            assert sample["resps"][0][0] == got.choices[0].text
    sys.stdout.write(harness.stdout[-2000:])
