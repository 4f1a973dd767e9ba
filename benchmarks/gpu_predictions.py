"""Compares what `benchmarks.gpu_session` has measured with the predictions of docs/gpu.md.

    python3 -m benchmarks.gpu_predictions OUT [--card H100]

Reads OUT/*.jsonl and prints a line for each figure of mint's: measured, predicted, and their ratio. Below half of a
prediction, stage `profile` says where the time goes. The predictions are declared here; a test compares the document
with them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mint.models.random_base import SHAPES

CARDS = {"H100": ("H100",), "24 GB": ("RTX 4090",)}
"""Cards, and what their names contain."""

TOO_SLOW = 0.5
"""Below this share of a prediction, something is wrong with the code or with the prediction."""


@dataclass(frozen=True)
class Prediction:
    """Tokens/s of one figure of a model on a card: what bandwidth or arithmetic allow, and what is expected. None: it
    does not fit on the card."""

    model: str
    figure: str
    card: str
    bound: float | None
    expected: float | None


PREDICTIONS = (
    Prediction("qwen3-0.6b", "sample-64", "H100", 90_600, 38_000),
    Prediction("qwen3-0.6b", "sample-256", "H100", 145_600, 74_600),
    Prediction("qwen3-0.6b", "sample-64", "24 GB", 27_200, 14_500),
    Prediction("qwen3-0.6b", "sample-256", "24 GB", 43_800, 25_000),
    Prediction("qwen3-4b", "sample-64", "H100", 22_400, 12_200),
    Prediction("qwen3-4b", "sample-256", "H100", 60_900, 34_100),
    Prediction("qwen3-4b", "sample-64", "24 GB", 6_760, 3_930),
    Prediction("qwen3-4b", "sample-256", "24 GB", 18_300, 10_800),
    Prediction("qwen3-8b", "sample-64", "H100", 12_900, 7_300),
    Prediction("qwen3-8b", "sample-256", "H100", 40_600, 23_200),
    Prediction("qwen3-8b", "sample-64", "24 GB", 3_880, 2_290),
    Prediction("qwen3-8b", "sample-256", "24 GB", None, None),
    Prediction("qwen3-0.6b", "train-long", "H100", 110_400, 33_000),
    Prediction("qwen3-0.6b", "train-long", "24 GB", 18_400, 6_300),
    Prediction("qwen3-4b", "train-long", "H100", 30_000, 10_400),
    Prediction("qwen3-4b", "train-long", "24 GB", 5_000, 1_700),
    Prediction("qwen3-8b", "train-long", "H100", 21_000, 7_400),
    Prediction("qwen3-8b", "train-long", "24 GB", 3_500, 1_200),
)

PRIME_RL = {"qwen3-0.6b": 13_342, "qwen3-4b": 6_230}
"""Tokens/s that prime-rl has published for one H100, a LoRA of rank 16 and sequences of 16k tokens."""


def model_of(shape: Mapping[str, Any]) -> str | None:
    """The name of a line's model; None if it is none of `SHAPES`."""
    found = (name for name, own in SHAPES.items() if (own.hidden, own.layers) == (shape["hidden"], shape["layers"]))
    return next(found, None)


def card_of(device: str) -> str | None:
    """The card of that name by torch; None: nothing was predicted for it."""
    return next((card for card, names in CARDS.items() if any(name in device for name in names)), None)


def compare(lines: Iterable[Mapping[str, Any]], card: str | None = None) -> Iterator[dict[str, Any]]:
    """A row for each measured figure of mint; `lines` are those of one stage. Without a `card`, it is the device that
    the stage's first line names."""
    for line in lines:
        if "device" in line and "figure" not in line:
            card = card or card_of(line["device"])
        if not str(line.get("contender", "")).startswith("mint") or "tokens_per_second" not in line:
            continue
        model = model_of(line["shape"]["model"])
        own = next(
            (one for one in PREDICTIONS if (one.model, one.figure, one.card) == (model, line["figure"], card)), None
        )
        measured, expected = line["tokens_per_second"], own and own.expected
        yield {
            "stage": line["stage"],
            "figure": line["figure"],
            "model": model,
            "card": card,
            "measured": measured,
            "bound": own and own.bound,
            "predicted": expected,
            "ratio": expected and measured / expected,
        }


def verdict(row: Mapping[str, Any]) -> str:
    """What a row of `compare` says."""
    if row["ratio"] is None:
        return "nothing was predicted"
    if row["bound"] < row["measured"]:
        return "above the bound: the measurement or the prediction is wrong"
    return "too slow: see stage profile" if row["ratio"] < TOO_SLOW else "as predicted, or near it"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--card", choices=CARDS, help="instead of the card that was measured on")
    given = parser.parse_args()
    for file in sorted(given.out.glob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for row in compare(lines, given.card):
            predicted, ratio = row["predicted"] or "-", row["ratio"]
            share = "-" if ratio is None else f"{ratio:.2f}"
            figures = f"{row['measured']:10.0f} {predicted:>8} {share:>5}"
            print(f"{row['stage']:12} {row['figure']:20} {figures}  {verdict(row)}")


if __name__ == "__main__":
    main()
