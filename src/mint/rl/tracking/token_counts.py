"""Counts of sampled, graded, informative and trained tokens.

Pure functions over the groups of a step, or over the rows of `rollouts.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

from rich.table import Table

from mint.rl.rollout import RolloutBatch
from mint.rl.training.policy_update import PolicyUpdate

CLIP_FRACTIONS = ("train/clip_low_fraction", "train/clip_high_fraction")


@dataclass(frozen=True)
class TokenCounts:
    """Counts of tokens; each is a part of the one before.

    `generated`: sampled · `graded`: of rollouts with a reward · `informative`: of groups with unequal rewards ·
    `trained`: in the loss with an advantage that is not 0.
    """

    generated: int = 0
    graded: int = 0
    informative: int = 0
    trained: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def token_metrics(batch: RolloutBatch, update: PolicyUpdate) -> dict[str, float]:
    """The `ledger/*` metrics of one step.

    `ledger/gradient` is `trained` less the tokens beyond the clip range, for losses that report one: an upper bound of
    what was lost, since a clipped ratio still has a gradient where the advantage pulls it back.
    """
    generated = [rollout for group in batch.all_groups for rollout in group.rollouts]
    informative = [rollout for group in batch.all_groups if len(set(group.rewards)) > 1 for rollout in group.graded]
    trained = float(sum(len(one.rollout.tokens) for one in update.trained if one.advantage))
    clipped = sum(update.metrics.get(name, 0.0) for name in CLIP_FRACTIONS)
    return {
        "ledger/generated": float(sum(len(rollout.tokens) for rollout in generated)),
        "ledger/graded": float(sum(len(rollout.tokens) for rollout in generated if rollout.reward is not None)),
        "ledger/informative": float(sum(len(rollout.tokens) for rollout in informative)),
        "ledger/trained": trained,
        "ledger/gradient": trained * max(0.0, 1.0 - clipped),
    }


def token_counts_by_item(rows: Iterable[Mapping[str, Any]]) -> dict[int, TokenCounts]:
    """Item (place in the dataset) → its counts over the rows of `rollouts.jsonl`, most generated tokens first."""
    sampled = [row for row in rows if row.get("tokens")]
    key = ("step", "group", "item")
    ordered = sorted(sampled, key=lambda row: tuple(row[name] for name in key))
    totals: dict[int, TokenCounts] = {}
    for (_, _, item), group in groupby(ordered, key=lambda row: tuple(row[name] for name in key)):
        totals[item] = totals.get(item, TokenCounts()) + _group_counts(list(group))
    return dict(sorted(totals.items(), key=lambda entry: -entry[1].generated))


def token_counts_of_steps(metrics: Iterable[Mapping[str, float]]) -> TokenCounts:
    """The sum over steps of `metrics.jsonl`."""
    names = [each.name for each in fields(TokenCounts)]
    steps = [TokenCounts(*(int(step.get(f"ledger/{name}", 0)) for name in names)) for step in metrics]
    return sum(steps, TokenCounts())


def token_counts_table(counts: Mapping[Any, TokenCounts], *, title: str, first: str = "item") -> Table:
    """A table for people: counts, and shares of the generated tokens."""
    table = Table(title=title)
    for column in (first, "generated", "graded", "informative", "trained"):
        table.add_column(column, justify="right")
    for name, row in counts.items():
        stages = (row.graded, row.informative, row.trained)
        shares = [f"{stage} ({stage / max(1, row.generated):.0%})" for stage in stages]
        table.add_row(str(name), str(row.generated), *shares)
    return table


def _group_counts(rows: Sequence[Mapping[str, Any]]) -> TokenCounts:
    graded = [row for row in rows if row["reward"] is not None]
    unequal = len({row["reward"] for row in graded}) > 1
    return TokenCounts(
        generated=_tokens(rows),
        graded=_tokens(graded),
        informative=_tokens(graded) if unequal else 0,
        trained=_tokens([row for row in graded if row["used"] and row["advantage"]]),
    )


def _tokens(rows: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(row["tokens"]) for row in rows)
