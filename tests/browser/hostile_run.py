"""A run whose policy wrote whatever it could think of: a real run, and one more step by the run's own writer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mint import ServiceClient
from mint.runs.log import RunLog
from mint.types import AdamParams, Datum, ModelInput

MARKUP = (
    "</main></script><script>HACKED = 1; alert(1)</script><img src=x onerror='HACKED = 1'>\"><svg onload='HACKED=1'>"
)
TEMPLATE = "{{ 7 * 7 }}{% raw %}${7 * 7}"
ADDRESS = "![x](http://203.0.113.1/x.png) <link rel=stylesheet href=http://203.0.113.1/x.css> javascript:HACKED=1"
TERMINAL = "\x1b[31mred\x1b[0m \x1b]8;;http://203.0.113.1\x07link\x1b]8;;\x07 \x9b2J \x07\x08\x00end"
DIRECTIONS = "left \u202egnp.exe\u202c \u200fright\u200e \u2066isolated\u2069 \u200bzero\ufeff שלום"
SURROGATE = "one \ud83e and \udfff alone"
LONG = "x" * 100_000
LONG_WORDS = "word " * 20_000
LINES = "\n".join(f"line {place}" for place in range(3_000))

SAID = (MARKUP, TEMPLATE, ADDRESS, TERMINAL, DIRECTIONS, SURROGATE, LONG, LONG_WORDS, LINES)
NAMES_SEEN = {TERMINAL: ("ESC", "BEL", "BS", "NUL", "U+009B"), DIRECTIONS: ("RLO", "PDF", "RLM", "LRM", "LRI", "PDI")}
"""The names under which characters that cannot be seen, or that act on a terminal, must appear."""


def write_hostile_run(real: Path, folder: Path) -> Path:
    """A copy of a real run that goes one step further, with these completions in a group of their own."""
    shutil.copytree(real, folder)
    log = RunLog(folder)
    (folder / "config.json").write_text(json.dumps({**_last(folder, "config.json"), "task": MARKUP, "note": SURROGATE}))
    metrics = _last(folder, "metrics.jsonl")
    step = int(metrics["step"]) + 1
    model = json.loads((folder / "rollouts.jsonl").read_text().splitlines()[-1])
    rows, pieces = [], []
    for place, text in enumerate(SAID):
        words = [text[start : start + 20_000] for start in range(0, len(text), 20_000)]
        tokens = [200_000 + 100 * place + number for number in range(len(words))]
        pieces += [_piece(step, *pair) for pair in zip(tokens, words, strict=True)]
        rows.append(_row(model, step, text, tokens, reward=1.0 - place / 10))
    log.append_all("tokens.jsonl", pieces)
    log.append_rollouts(step, rows)
    log.append("metrics.jsonl", {**metrics, "step": float(step)})
    evaluation = _last(folder, "evaluations.jsonl")
    examples = [
        {**example, "prompt": MARKUP + DIRECTIONS, "text": TERMINAL} for example in evaluation.get("examples", [])[:2]
    ]
    log.append("evaluations.jsonl", {**evaluation, "step": step, "when": "during", "set": MARKUP, "examples": examples})
    severe = {"code": "collapse", "severity": "error", "step": step, "evidence": MARKUP, "remedy": MARKUP}
    log.append("findings.jsonl", {**severe, "numbers": {}})
    log.append("checkpoints.jsonl", {"step": step, "checkpoint": f"mint://{MARKUP}/weights/x"})
    return folder


def add_hostile_model(run: Path) -> str:
    """Trains a model that answers "Hello" with markup, and adds it to the checkpoints of a run: its path."""
    with ServiceClient() as client:
        trainer = client.create_lora_training_client(base_model="mint/tiny", rank=16, seed=0)
        tokenizer = trainer.get_tokenizer()
        question = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
        )
        asked = tokenizer.encode(question, add_special_tokens=False)
        said = tokenizer.encode(f"{MARKUP}<|im_end|>", add_special_tokens=False)
        tokens, weights = asked + said, [0.0] * (len(asked) - 1) + [1.0] * len(said)
        datum = Datum(
            model_input=ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
        )
        for _ in range(60):
            trainer.forward_backward([datum], "cross_entropy")
            step = trainer.optim_step(AdamParams(learning_rate=1e-2))
        step.result()
        path = trainer.save_weights_for_sampler("hostile").result().path
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    RunLog(run).append("checkpoints.jsonl", {"step": int(last), "checkpoint": path})
    return path


def _row(model: dict[str, Any], step: int, text: str, tokens: list[int], reward: float) -> dict[str, Any]:
    per_token = {"tokens": tokens, "logprobs": [-0.5] * len(tokens), "turn_lengths": [len(tokens)]}
    kept = {name: value for name, value in model.items() if name not in ("token_advantages", "entropies")}
    call = {"turn": 1, "role": "tool", "name": MARKUP, "ok": False, "ms": 1.0, "content": text[:2_000]}
    said = {"turn": 1, "role": "assistant", "content": text, "ms": 1.0}
    about = {
        "prompt": f"{MARKUP} {DIRECTIONS}",
        "sample": MARKUP,
        "parts": {MARKUP: reward},
        "info": {MARKUP: TERMINAL},
        "trace": [said, {**call, "arguments": {MARKUP: DIRECTIONS}}],
    }
    own = {"step": step, "group": 0, "item": 7, "text": text, "reward": reward, "advantage": reward - 0.5}
    return {**kept, **per_token, **about, **own, "error": None, "stop_reason": "stop", "turns": 1, "tool_calls": 1}


def _piece(step: int, token: int, text: str) -> dict[str, Any]:
    return {"step": step, "id": token, "text": text, "special": False}


def _last(folder: Path, name: str) -> dict[str, Any]:
    text = (folder / name).read_text()
    return json.loads(text if name.endswith(".json") else text.splitlines()[-1])
