"""The pages of runs in a browser: every number that stands there is one of the run folder."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from tests.browser.browser_harness import Tab, lines, location, number, path_of, texts

pytestmark = pytest.mark.slow

RUNS = ("tools", "math", "stuck")

CHARTS = {
    "reward": {"success rate": "success/rate", "reward": "reward/mean"},
    "parts": {"outcome": "reward/part/outcome"},
    "entropy": {"trained tokens": "train/entropy", "all, by logprob": "rollouts/entropy_estimate"},
    "kl": {"k1": "train/kl_k1", "k2": "train/kl_k2", "k3": "train/kl_k3"},
    "reference": {"k1": "kl/policy_reference_k1", "k3": "kl/policy_reference_k3"},
    "length": {"mean": "rollouts/mean_length", "longest": "rollouts/max_length"},
    "truncation": {"truncated": "rollouts/truncated_share", "duplicate": "rollouts/duplicate_share"},
    "turns": {"turns": "rollouts/turns_mean", "tool calls": "rollouts/tool_calls_mean"},
    "norms": {"gradient": "optim/grad_norm", "update": "optim/update_norm"},
    "ratio": {"mean": "train/ratio", "min": "train/ratio_min", "max": "train/ratio_max", "p99": "train/ratio_p99"},
    "mismatch": {"mean": "mismatch/mean_abs_logprob_diff", "max": "mismatch/max_abs_logprob_diff"},
    "rate": {"learning rate": "learning_rate"},
    "phases": {
        "sampling": "time/sampling_s",
        "grading after it": "time/grading_after_sampling_s",
        "training": "time/train_s",
    },
}
"""What the folder calls the numbers of each chart; written down apart from the scripts that draw them."""


def noted(folder: Path) -> list[dict[str, Any]]:
    """The findings of a run folder: of each code the last line, which may be more severe than the first."""
    return list({finding["code"]: finding for finding in lines(folder, "findings.jsonl")}.values())


def sampled_evaluations(folder: Path, temperature: float = 1.0) -> list[dict[str, Any]]:
    return [row for row in lines(folder, "evaluations.jsonl") if row["temperature"] == temperature]


def fixed(value: float, digits: int = 3) -> str:
    """As scripts write it: of two that are equally near, the larger."""
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def interval(row: dict[str, Any]) -> str:
    return f"[{fixed(row['low'])}, {fixed(row['high'])}]"


def headline(folder: Path) -> dict[str, str]:
    """What must stand in the row of a run, and in its headline."""
    metrics = lines(folder, "metrics.jsonl")
    evaluation, rewards = sampled_evaluations(folder)[-1], [row["reward/mean"] for row in metrics]
    return {
        "step": f"{len(metrics)} / {len(metrics)}",
        "reward": fixed(rewards[-1]),
        "best": fixed(max(rewards)),
        "heldout": fixed(evaluation["mean"]),
        "interval": interval(evaluation),
        "success": f"{fixed(100 * metrics[-1]['success/rate'], 1)} %",
        "state": "finished",
    }


def cells(page: Any, inside: str, names: Any) -> dict[str, str]:
    return {name: page.locator(f"{inside} [data-cell={name}]").inner_text().strip() for name in names}


@pytest.mark.parametrize("run", RUNS)
def test_the_table_of_runs_has_the_numbers_of_each_folder(tab: Tab, home: Path, run: str) -> None:
    page = tab.open("/")
    folder, row = home / "runs" / run, f"tr[data-run={run}]"
    wanted = headline(folder)
    assert cells(page, row, wanted) == wanted
    counts = dict.fromkeys(("error", "warning", "info"), 0)
    for finding in noted(folder):
        counts[finding["severity"]] += 1
    shown = {kind: "".join(texts(page, f"{row} .tag--{kind}:not([data-cell=state])")) for kind in counts}
    assert shown == {kind: str(count or "") for kind, count in counts.items()}
    recent = lines(folder, "metrics.jsonl")[-10:]
    seconds = sum(one["time/rollouts_s"] + one["time/train_s"] for one in recent)
    rate = sum(one["rollouts/tokens"] for one in recent) / seconds
    text = cells(page, row, ["rate"])["rate"]
    assert float(text.removesuffix("k")) * (1000 if text.endswith("k") else 1) == pytest.approx(rate, rel=0.06)
    wait_until(lambda: page.locator(f"{row} .spark polyline").count() == 1)


def test_every_column_of_the_runs_is_in_sight_on_a_small_screen(tab: Tab) -> None:
    page = tab.open("/")
    table = page.locator(".scroll", has=page.locator("#runs"))
    for width in (1280, 1000):
        page.set_viewport_size({"width": width, "height": 800})
        assert table.evaluate("it => it.scrollWidth <= it.clientWidth"), width


def test_the_table_sorts_filters_and_keeps_both_in_its_address(tab: Tab, home: Path) -> None:
    page = tab.open("/")
    rewards = {run: lines(home / "runs" / run, "metrics.jsonl")[-1]["reward/mean"] for run in RUNS}
    page.locator("th[data-key=reward] button").click()

    def shown_rewards() -> list[float]:
        names = page.locator("#rows tr").evaluate_all("rows => rows.map((row) => row.dataset.run)")
        return [rewards[name] for name in names if name in rewards]

    wait_until(lambda: shown_rewards() == sorted(rewards.values(), reverse=True))
    page.keyboard.press("/")
    page.keyboard.type("adapter")
    wait_until(lambda: page.locator("#rows tr:visible").count() == 2)  # of these tasks
    wait_until(lambda: "q=adapter" in location(page) and "sort=-reward" in location(page))
    page.reload()
    tab.settled()
    assert page.locator("#rows tr:visible").count() == 2
    assert page.locator("th[data-key=reward]").get_attribute("aria-sort") == "descending"


@pytest.mark.parametrize("run", RUNS)
def test_the_headline_of_a_run_has_the_numbers_of_its_folder(tab: Tab, home: Path, run: str) -> None:
    folder = home / "runs" / run
    page = tab.open(path_of(run))
    wanted = headline(folder)
    assert cells(page, ".headline", wanted) == wanted
    evaluations = sampled_evaluations(folder)
    gain = evaluations[-1]["mean"] - evaluations[0]["mean"]
    shown = page.locator(".headline [data-cell=gain]").inner_text()
    sign = "+" if gain >= 0 else "−"
    assert shown == f"from {fixed(evaluations[0]['mean'])} ({sign}{fixed(abs(gain))})"
    found = noted(folder)
    assert texts(page, "#findings .tag") == [finding["code"] for finding in found]
    assert all(finding["evidence"] in page.locator("#findings").inner_text() for finding in found)


@pytest.mark.parametrize("run", ["tools", "math"])
def test_every_chart_shows_the_numbers_of_every_step(tab: Tab, home: Path, run: str) -> None:
    folder = home / "runs" / run
    steps = {int(row["step"]): row for row in lines(folder, "metrics.jsonl")}
    page = tab.open(path_of(run))
    seen = 0
    for chart, names in CHARTS.items():
        known = {label: name for label, name in names.items() if any(name in row for row in steps.values())}
        shown = chart_table(page, chart)
        if chart == "turns" and run == "math":
            known = {}
        assert bool(shown) == bool(known), chart
        for step, row in shown.items():
            for label, name in known.items():
                assert_shows(row[label], steps[step].get(name), f"{chart} {label} step {step}")
                seen += 1
        assert not shown or sorted(shown) == sorted(steps), chart
    assert seen > 20 * len(steps)
    told = page.locator("[data-chart=rate] .chart-legend").inner_text()
    assert "temperature 1" in told, "a constant on an axis of its own is told, and not drawn"


def test_the_chart_of_evaluations_shows_each_with_its_interval(tab: Tab, home: Path) -> None:
    page = tab.open(path_of("tools"))
    shown = chart_table(page, "heldout")
    for temperature, label in ((1.0, "temperature 1"), (0.0, "greedy")):
        evaluations = sampled_evaluations(home / "runs" / "tools", temperature)
        assert [evaluation["step"] for evaluation in evaluations] == [0, 3, 6] == sorted(shown)
        for evaluation in evaluations:
            values = [float(part) for part in re.findall(r"[\d.]+", shown[evaluation["step"]][label])]
            assert values == pytest.approx([evaluation["mean"], evaluation["low"], evaluation["high"]], abs=1e-4)


def test_the_crosshair_says_the_numbers_of_its_step_and_leads_to_its_rollouts(tab: Tab, home: Path) -> None:
    steps = lines(home / "runs" / "tools", "metrics.jsonl")
    page = tab.open(path_of("tools"))
    plot = page.locator("[data-chart=reward] .chart-plot")
    wait_until(lambda: "latest" in plot.get_attribute("aria-label"))
    plot.focus()
    for row in steps:
        page.keyboard.press("ArrowRight")
        if row["step"] == 1 and "step 0" in plot.get_attribute("aria-label"):
            page.keyboard.press("ArrowRight")  # the evaluations before training have a place, too
        said = plot.get_attribute("aria-label")
        assert f"step {row['step']:.0f}:" in said
        values = shown_values(page, "reward")
        assert_shows(values["reward"], row["reward/mean"], said)
        assert_shows(values["success rate"], row["success/rate"], said)
    page.keyboard.press("Enter")
    page.wait_for_url("**/rollouts?step=6**")
    tab.settled()


def test_charts_in_which_nothing_changes_are_one_line_of_text(tab: Tab, home: Path) -> None:
    steps = lines(home / "runs" / "tools", "metrics.jsonl")
    assert {row["train/kl_k1"] for row in steps} == {0.0} and len({row["reward/mean"] for row in steps}) > 1
    page = tab.open(path_of("tools"))
    card, folded = page.locator("[data-chart=kl]"), page.locator("#constants [data-folded=kl]")
    assert card.is_hidden() and folded.inner_text() == "KL to the sampling policy k1 0, k2 0, k3 0"
    assert page.locator("#constants [data-folded=reward]").count() == 0
    folded.click()
    assert card.is_visible() and folded.count() == 0


def test_the_crosshair_names_the_step_of_the_reading_that_it_shows(tab: Tab, home: Path) -> None:
    readings = {row["step"]: row["mean"] for row in sampled_evaluations(home / "runs" / "tools")}
    page = tab.open(path_of("tools"))
    plot = page.locator("[data-chart=reward] .chart-plot")
    wait_until(lambda: "latest" in plot.get_attribute("aria-label"))
    page.locator("[data-chart=heldout]").scroll_into_view_if_needed()
    wait_until(lambda: page.locator("[data-chart=heldout] .key b").count())
    plot.focus()
    page.keyboard.press("Home")
    for _ in range(6):
        step = int(re.findall(r"step (\d+):", plot.get_attribute("aria-label"))[0])
        value, _, own = texts(page, "[data-chart=heldout] .key b")[0].partition(" at step ")
        assert abs(int(own) - step) == min(abs(reading - step) for reading in readings), step
        assert number(value) == pytest.approx(readings[int(own)], abs=6e-4), step
        page.keyboard.press("ArrowRight")


def test_axis_smoothing_zoom_and_metrics_come_back_with_the_address(tab: Tab) -> None:
    page = tab.open(path_of("tools"))
    page.keyboard.press("a")
    page.keyboard.press("s")
    page.locator("#metric").fill("train/loss")
    page.locator("#metric").press("Enter")
    wait_until(lambda: all(part in location(page) for part in ("axis=time", "smooth=0.1", "metric=train%2Floss")))
    page.evaluate("scrollTo(0, 0)")
    box = page.locator("[data-chart=reward] .u-over").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 20, steps=4)
    page.mouse.up()
    wait_until(lambda: "zoom=" in location(page))
    page.reload()
    tab.settled()
    assert page.locator("[data-axis=time]").get_attribute("aria-pressed") == "true"
    assert page.locator(".smoothing-value").inner_text() == "0.10"
    assert page.locator("[data-chart='metric:train/loss']").count() == 1
    page.locator("#whole").click()
    wait_until(lambda: "zoom=" not in location(page))


def test_several_runs_stand_in_the_same_table_and_charts(tab: Tab, home: Path) -> None:
    page = tab.open("/")
    for run in ("tools", "math"):
        page.locator(f"tr[data-run={run}] input[type=checkbox]").check()
    page.keyboard.press("c")
    page.wait_for_url("**/compare?run=*")
    tab.settled()
    rows = {row.locator("th").inner_text(): row.inner_text() for row in page.locator("#compared tr").all()}
    assert rows.keys() == {"tools", "math"}
    for run, text in rows.items():
        wanted = headline(home / "runs" / run)
        assert all(value in text for value in wanted.values()), (text, wanted)
    assert "group_size" not in rows["tools"]  # what they have in common
    assert "max_tokens" in rows["tools"]
    page.locator("[data-chart=reward] .chart-choice button", has_text="reward").last.click()
    shown = chart_table(page, "reward")
    for run in ("tools", "math"):
        for metrics in lines(home / "runs" / run, "metrics.jsonl"):
            assert_shows(shown[int(metrics["step"])][f"{run}, reward"], metrics["reward/mean"], run)


def chart_table(page: Any, chart: str) -> dict[int, dict[str, str]]:
    """What a chart shows, by step and label; nothing where there is no such chart."""
    card = page.locator(f"[data-chart={chart}]")
    if page.locator(f"[data-folded={chart}]").count():
        page.locator(f"[data-folded={chart}]").click()
    if not card.count() or card.is_hidden():
        return {}
    card.scroll_into_view_if_needed()
    if card.locator(".chart-table").is_hidden():
        card.locator(".chart-toggle").last.click()
    wait_until(lambda: card.locator("tbody tr").count())
    _, *heads = card.locator("thead th").all_inner_texts()

    def values(row: Any) -> dict[str, str]:
        shown = zip(heads, row.locator("td").all_inner_texts(), strict=True)
        return {label: text for head, text in shown for label in head.split(" = ")}

    return {int(row.locator("th").inner_text()): values(row) for row in card.locator("tbody tr").all()}


def shown_values(page: Any, chart: str) -> dict[str, str]:
    """The numbers in the legend of a chart by label; one entry may stand for several equal series."""
    keys = page.locator(f"[data-chart={chart}] .key").all()
    shown = [(key.inner_text(), key.locator("b").inner_text()) for key in keys]
    return {label: value for text, value in shown for label in text.removesuffix(value).strip().split(" = ")}


def assert_shows(text: str, value: float | None, where: str) -> None:
    """That a text is a number to the digits in which it is written."""
    if value is None:
        assert text in ("", "–"), where
        return
    if text.endswith("%"):
        assert number(text) == pytest.approx(100 * value, abs=0.0501), where
    elif text.endswith(" s"):
        assert float(text[:-2]) == pytest.approx(value, abs=0.0501 if value < 10 else 0.501), where
    else:
        digits = 6e-3 if "e" in text else 6e-4
        whole = 0.501 if where.startswith("length") else 0.0  # lengths are counts, written without fractions from 10 on
        assert number(text) == pytest.approx(value, rel=digits, abs=whole), where
