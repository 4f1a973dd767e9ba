"""lm-eval: choices are scored and texts generated, by `local-completions` and by `local-chat-completions`.

The scores are compared with the server's `prompt_logprobs`, the texts with those of plain requests.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from checks import check, report, target

TARGET = target()
TOKENIZER = str(Path(TARGET.model).resolve())
WORK = Path("lm_eval_work")
GENERATED_TOKENS = 24
PAIRS = [(3, 4), (2, 2), (5, 1), (6, 7), (8, 0), (9, 9)]
DOCUMENTS = [
    {"question": f"What is {a} + {b}? It is", "choices": [str(a + b), str(a + b + 1)], "answer": 0} for a, b in PAIRS
]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
TASKS: dict[str, dict[str, Any]] = {
    "mint_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "mint_generate": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": GENERATED_TOKENS, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def post(path: str, **body: Any) -> dict[str, Any]:
    """A plain request."""
    request = urllib.request.Request(
        f"{TARGET.url.removesuffix('/v1')}{path}",
        json.dumps({"model": TARGET.model, **body}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {TARGET.key}"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def evaluate(kind: str, route: str, *tasks: str) -> dict[str, list[dict[str, Any]]]:
    """The samples of each task."""
    folder = WORK / kind
    folder.mkdir(parents=True)
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS))
    for name in tasks:
        task = {"task": name, "dataset_kwargs": {"data_files": {"test": str(data.resolve())}}, **COMMON, **TASKS[name]}
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    model = f"base_url={TARGET.url}/{route},model={TARGET.model},tokenizer={TOKENIZER},tokenizer_backend=huggingface"
    command = [sys.executable, "-m", "lm_eval", "--model", kind, "--tasks", ",".join(tasks)]
    command += ["--model_args", f"{model},num_concurrent=4,max_length=1024", "--include_path", str(folder)]
    command += ["--log_samples", "--output_path", str(folder / "out")]
    if kind == "local-chat-completions":
        command.append("--apply_chat_template")
    ran = subprocess.run(
        command, env={**os.environ, "HF_HOME": str(folder / "hf")}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return {
        name: [json.loads(line) for file in (folder / "out").rglob(f"samples_{name}_*.jsonl") for line in file.open()]
        for name in tasks
    }


def logprob(context: str, continuation: str) -> float:
    """Of the continuation's tokens, after the context's."""
    ids = post("/tokenize", prompt=context + continuation)["tokens"]
    start = len(post("/tokenize", prompt=context)["tokens"])
    rows = post("/v1/completions", prompt=ids, max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    return sum(rows[place][str(ids[place])]["logprob"] for place in range(start, len(ids)))


@check("local-completions: scores of choices, generated texts")
def completions() -> None:
    samples = evaluate("local-completions", "completions", "mint_choice", "mint_generate")
    assert len(samples["mint_choice"]) == len(samples["mint_generate"]) == len(DOCUMENTS)
    for sample in samples["mint_choice"]:
        for (scored, _greedy), choice in zip(sample["filtered_resps"], sample["doc"]["choices"], strict=True):
            own = logprob(sample["doc"]["question"], f" {choice}")
            assert math.isclose(float(scored), own, abs_tol=1e-4), (scored, own)
    for sample in samples["mint_generate"]:
        options = {"max_tokens": GENERATED_TOKENS, "temperature": 0, "stop": ["."]}
        got = post("/v1/completions", prompt=sample["doc"]["question"], **options)
        assert sample["resps"][0][0] == got["choices"][0]["text"]


@check("local-chat-completions: generated texts")
def chat() -> None:
    [samples] = evaluate("local-chat-completions", "chat/completions", "mint_generate").values()
    assert len(samples) == len(DOCUMENTS)
    for sample in samples:
        options = {"max_tokens": GENERATED_TOKENS, "temperature": 0, "stop": ["."]}
        asked = [{"role": "user", "content": sample["doc"]["question"]}]
        got = post("/v1/chat/completions", messages=asked, **options)
        assert sample["resps"][0][0] == got["choices"][0]["message"]["content"]


if __name__ == "__main__":
    report("lm_eval")
