"""The page of diagnosis in a browser, over a run that cannot learn: its findings, and the samples that show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from tests.browser.browser_harness import Tab, lines, number, path_of, texts

pytestmark = pytest.mark.slow


def latest_findings(folder: Path) -> dict[str, dict[str, Any]]:
    """By code, as the run noted them last."""
    return {row["code"]: row for row in lines(folder, "findings.jsonl")}


def test_each_finding_stands_there_with_evidence_numbers_and_remedy(tab: Tab, home: Path) -> None:
    found = latest_findings(home / "runs" / "stuck")
    assert "truncation" in found
    page = tab.open(path_of("stuck", "/diagnosis"))
    wait_until(lambda: page.locator(".finding").count() >= len(found))
    for code, finding in found.items():
        card = page.locator(f".finding[data-code={code}]")
        assert card.locator(".tag").first.inner_text() == finding["severity"]
        text = " ".join(card.inner_text().split())
        assert f"step {finding['step']}" in text
        assert " ".join(finding["evidence"].split()) in text
        assert " ".join(finding["remedy"].split()) in text
        wait_until(lambda card=card: card.locator(".finding-numbers b").count())
        shown = [number(value) for value in card.locator(".finding-numbers b").all_inner_texts()]
        assert shown == pytest.approx(list(finding["numbers"].values()), rel=6e-4)


def test_a_finding_leads_to_the_very_samples_that_show_it(tab: Tab, home: Path) -> None:
    rows = lines(home / "runs" / "stuck", "rollouts.jsonl")
    finding = latest_findings(home / "runs" / "stuck")["truncation"]
    page = tab.open(path_of("stuck", "/diagnosis"))
    wait_until(lambda: page.locator(".finding[data-code=truncation] .shown").count() == 3)
    texts_of_rows = {row["text"] for row in rows if row["truncated"] and row["step"] <= finding["step"]}
    shown = page.locator(".finding[data-code=truncation] .shown-text").all_inner_texts()
    assert all(text.strip() in {one.strip() for one in texts_of_rows} for text in shown[1::2])
    page.locator(".finding[data-code=truncation] .finding-link a").click()
    page.wait_for_url("**/rollouts?**")
    tab.settled()
    total = int(texts(page, "#list-title")[0].split()[0].replace(",", ""))
    assert 0 < total <= sum(row["truncated"] for row in rows)
    assert page.locator(".sample .tag--warning", has_text="truncated").count() > 0


def test_the_ledger_sums_the_tokens_of_all_steps(tab: Tab, home: Path) -> None:
    metrics = lines(home / "runs" / "tools", "metrics.jsonl")
    page = tab.open(path_of("tools", "/diagnosis"))
    whole = sum(row["ledger/generated"] for row in metrics)
    for stage in ("generated", "graded", "informative", "trained", "gradient"):
        tokens = sum(row[f"ledger/{stage}"] for row in metrics)
        row = page.locator(f"#ledger [data-stage={stage}]")
        text = row.locator("[data-cell=tokens]").inner_text()
        shown = float(text.removesuffix("k")) * (1_000 if text.endswith("k") else 1)
        assert shown == pytest.approx(tokens, abs=50 if text.endswith("k") else 0.5)
        assert number(row.locator("[data-cell=share]").inner_text()) == pytest.approx(100 * tokens / whole, abs=0.0501)


def test_a_run_without_findings_says_that_it_was_looked_at(tab: Tab, home: Path) -> None:
    assert latest_findings(home / "runs" / "math") == {}
    page = tab.open(path_of("math", "/diagnosis"))
    wait_until(lambda: "No findings" in page.locator("#verdict").inner_text())
    assert "6 steps" in page.locator("#verdict").inner_text()
