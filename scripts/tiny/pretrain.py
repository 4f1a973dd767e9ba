"""Pre-trains the bundled base model and writes it, its tokenizer and its training log.

With `--tokens` the run is a function of (seed, tokens) up to the rounding of the machine's matrix products; `--minutes`
measures the speed first and sets the token budget from it. Exits with 1 when a gate of the probes fails.

    python -m scripts.tiny.pretrain --tokens 30000000 --output src/mint/models/tiny
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from scripts.tiny.corpus import ROW_LENGTH, Batch, draw_batch, sample_texts, token_shares
from scripts.tiny.muon import Muon
from scripts.tiny.network import CONFIG, Network
from scripts.tiny.probes import LOG_NAME, failed_gates, measure, write_card
from scripts.tiny.tokenizer import save_tokenizer, train_tokenizer

ROWS = 40
MUON_RATE = 0.02
ADAM_RATE = 3e-3
WARMUP_SHARE, DECAY_SHARE = 0.02, 0.4
TOKENIZER_DOCUMENTS = 40_000


@dataclass(frozen=True)
class LogRow:
    """One point of the loss curve."""

    step: int
    tokens: int
    seconds: float
    loss: float


def rate_scale(share_done: float) -> float:
    """The factor on both learning rates: a short warm-up, a plateau, and a linear decay to nearly zero."""
    return min(1.0, (share_done + 0.001) / WARMUP_SHARE, max(0.01, (1 - share_done) / DECAY_SHARE))


def tensors(batch: Batch) -> list[torch.Tensor]:
    """The batch in the order of `Network.forward`."""
    arrays = (batch.ids_RL, batch.targets_RL, batch.weights_RL, batch.positions_RL, batch.document_RL)
    return [torch.from_numpy(array) for array in arrays]


class Trainer:
    """The network with its two optimizers."""

    def __init__(self, seed: int, *, compile_network: bool) -> None:
        self.network = Network(seed)
        self.forward = torch.compile(self.network) if compile_network else self.network
        named = list(self.network.named_parameters())
        self.muon = Muon([p for name, p in named if p.dim() == 2 and "embed" not in name])
        self.adam = torch.optim.AdamW(
            [p for name, p in named if p.dim() < 2 or "embed" in name],
            lr=ADAM_RATE,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )

    def step(self, batch: Batch, scale: float) -> float:
        """One update of all weights; returns the loss before it."""
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.forward(*tensors(batch))
        loss.backward()
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * scale
        self.adam.step()
        self.muon.step(MUON_RATE * scale)
        self.network.zero_grad(set_to_none=True)
        return loss.item()


def train(trainer: Trainer, tokenizer: Tokenizer, seed: int, budget: int, publish_every_s: float, output: Path) -> dict:
    """Steps until the token budget is spent, publishing the weights now and then. Returns the training log."""
    started = published = time.monotonic()
    tokens = step = 0
    curve: list[LogRow] = []
    recent: list[float] = []
    while tokens < budget:
        batch = draw_batch(seed, step, tokenizer, ROWS)
        recent.append(trainer.step(batch, rate_scale(tokens / budget)))
        tokens += batch.tokens
        step += 1
        seconds = time.monotonic() - started
        if len(recent) == 50 or tokens >= budget:
            curve.append(LogRow(step, tokens, round(seconds, 1), round(sum(recent) / len(recent), 4)))
            recent = []
            print(f"step {step} tokens {tokens} loss {curve[-1].loss} {tokens / seconds:.0f} tok/s", flush=True)
        if time.monotonic() - published > publish_every_s:
            published = time.monotonic()
            save_model(trainer.network, output)
    seconds = time.monotonic() - started
    return {
        "seed": seed,
        "budget": budget,
        "tokens": tokens,
        "steps": step,
        "tokens_per_step": ROWS * ROW_LENGTH,
        "seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "token_shares": {name: round(share, 4) for name, share in token_shares(seed, 500, tokenizer).items()},
        "loss_curve": [asdict(row) for row in curve],
    }


def measured_budget(seed: int, tokenizer: Tokenizer, minutes: float) -> int:
    """How many tokens fit into the minutes at the speed of a throw-away trainer."""
    trainer = Trainer(seed, compile_network=True)
    trainer.step(draw_batch(seed, 0, tokenizer, ROWS), 0.01)
    started = time.monotonic()
    tokens = 0
    for step in range(20):
        batch = draw_batch(seed, step, tokenizer, ROWS)
        trainer.step(batch, 0.01)
        tokens += batch.tokens
    return int(tokens / (time.monotonic() - started) * minutes * 60)


def save_model(network: Network, output: Path) -> None:
    """Writes config and bf16 weights under temporary names, then renames them, so that readers see whole files."""
    output.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in network.state_dict().items()}
    generation = {
        "do_sample": True,
        "temperature": 1.0,
        "eos_token_id": CONFIG["eos_token_id"],
        "pad_token_id": CONFIG["pad_token_id"],
    }
    temporary = output / "model.safetensors.part"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(output / "model.safetensors")
    write_json(output / "config.json", CONFIG)
    write_json(output / "generation_config.json", generation)


def write_json(path: Path, content: dict) -> None:
    """Replaces the file in one step."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)


def main() -> int:
    """Trains, saves, probes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--tokens", type=int, help="token budget: the reproducible way")
    budget.add_argument("--minutes", type=float, help="a budget measured on this machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--publish-every", type=float, default=300.0, help="seconds between unfinished weights")
    parser.add_argument("--eager", action="store_true", help="no torch.compile (needs no C compiler, slower)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    tokenizer = train_tokenizer(sample_texts(arguments.seed, TOKENIZER_DOCUMENTS))
    save_tokenizer(tokenizer, arguments.output)
    tokens = arguments.tokens or measured_budget(arguments.seed, tokenizer, arguments.minutes)
    trainer = Trainer(arguments.seed, compile_network=not arguments.eager)
    log = train(trainer, tokenizer, arguments.seed, tokens, arguments.publish_every, arguments.output)
    save_model(trainer.network, arguments.output)
    write_json(arguments.output / LOG_NAME, log)
    report = measure(arguments.output)
    write_json(arguments.output / LOG_NAME, {**log, "probes": report})
    write_card(arguments.output, log, report)
    failed = failed_gates(report)
    for failure in failed:
        print(f"gate failed: {failure}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
