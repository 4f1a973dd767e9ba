"""The page of rollouts in a real browser: it shows what the run folder holds, and nothing of it is ever obeyed."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import wait_until

from mint.recipes.tools import DEMO, ToolsAdapter
from mint.rl import run_grpo
from tests.dashboard.dashboard_harness import API, append, metrics, rollout, showing
from tests.generated_runs import write_process

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

EMOJI = "🧪".encode()
LONG = "x" * 100_000
HOSTILE: list[list[str | bytes]] = [
    ["<script>", "HACKED = 1", "</script>", "</main>", "<img src=x onerror='HACKED = 1'>"],
    ["\x1b[31m", "red", "\x1b]8;;http://evil.example\x07", "\x00", "\x9b"],
    ["left", "\u202e", "thgir", "\u202c", "\u200f\u200b\ufeff", "\u2066", "tag\U000e0041", "\r\n\ttab"],
    ["one ", EMOJI[:2], EMOJI[2:3], EMOJI[3:], " and ", b"\xff", " none"],
    [LONG],
    [word for place in range(3_000) for word in (f"word{place}", " ")],
]
PROMPT = "</textarea><script>HACKED = 1</script>\u202e What?"


class Pages:
    """A browser tab at a dashboard; `check` says that nothing went wrong and nothing left the machine."""

    def __init__(self, page: Any, client: httpx.Client) -> None:
        self.page = page
        self.client = client
        self.address = str(client.base_url).rstrip("/")
        self.faults: list[str] = []
        page.on("console", lambda said: said.type in ("error", "warning") and self.faults.append(said.text))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))
        page.on("request", lambda sent: sent.url.startswith(self.address) or self.faults.append(sent.url))

    def open(self, run: str, query: str = "") -> Any:
        self.page.goto(f"{self.address}/runs/{run}/rollouts{query}")
        self.page.wait_for_selector(".sample")
        return self.page

    def api(self, run: str, rest: str) -> Any:
        return self.client.get(f"{API}/runs/{run}/{rest}").raise_for_status().json()

    def check(self) -> None:
        assert self.faults == []
        assert self.page.evaluate("typeof HACKED") == "undefined"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a real run of few items, and one whose policy wrote whatever it could think of."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MINT_HOME", str(folder))
        environment.setenv("MINT_THREADS", "1")
        settings = {"steps": 4, "group_size": 4, "batch_size": 2, "kl_penalty_coef": 0.05}
        config = DEMO.changed(**settings, run_dir=folder / "runs" / "tools")
        run_grpo(ToolsAdapter(train_size=4, heldout_size=4), config)
    write_hostile(folder / "runs" / "hostile")
    return folder


def write_hostile(folder: Path, planned: int = 1) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"task": "hostile", "base_model": "mint/tiny", "steps": planned}))
    ids = iter(range(10, 100_000))
    for place, said in enumerate(HOSTILE):
        tokens = [next(ids) for _ in said]
        append(folder, "tokens.jsonl", *(piece(one, text) for one, text in zip(tokens, said, strict=True)))
        text = "".join(part if isinstance(part, str) else part.decode(errors="replace") for part in said)
        own = {"group": 0, "item": 7, "prompt": PROMPT, "text": text, "tokens": tokens, "reward": -place / 10}
        row = {
            **rollout(1, place),
            **own,
            "logprobs": [-0.1] * len(tokens),
            "error": None,
            "info": {"<b>": "<i>", "half": "\ud800"},
        }
        with (folder / "rollouts.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")  # half a pair of surrogates can only be written as an escape
    append(folder, "metrics.jsonl", metrics(1))


def piece(one: int, text: str | bytes) -> dict[str, Any]:
    if isinstance(text, str):
        return {"step": 1, "id": one, "text": text, "special": False}
    return {"step": 1, "id": one, "text": text.decode(errors="replace"), "special": False, "bytes": text.hex()}


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    with showing(home) as (_, client):
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def pages(browser: Any, client: httpx.Client) -> Iterator[Pages]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    pages = Pages(context.new_page(), client)
    yield pages
    pages.check()
    context.close()


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def unfold(page: Any) -> None:
    """Shows each of the equal samples that stand behind one card."""
    while page.locator(".sample-count").count():
        page.locator(".sample-count").first.click()


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def test_a_group_is_shown_with_the_numbers_of_the_run_folder_best_first(pages: Pages, home: Path) -> None:
    lines = (home / "runs" / "tools" / "rollouts.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if (row["step"], row["group"]) == (2, 1)]
    rows.sort(key=lambda row: -row["reward"])
    page = pages.open("tools", "?step=2&group=1")
    unfold(page)
    assert [number(text) for text in texts(page, ".sample-reward")] == [round(row["reward"], 3) for row in rows]
    assert [number(text) for text in texts(page, ".sample-head .sign")] == [round(row["advantage"], 3) for row in rows]
    assert page.locator(".sample").count() == 4
    assert page.locator("#entries .entry").count() == 2
    for card, row in zip(page.locator(".sample").all(), rows, strict=True):
        assert card.locator(".tok").count() == len(row["tokens"])
        assert f"{len(row['tokens'])} tok · {row['stop_reason']}" in card.locator(".sample-end").inner_text()
        said = "".join(card.locator(".tok:not(.tok--special)").all_text_contents()).replace("⏎", "")
        assert said == row["text"].replace("<tool_call>", "").replace("</tool_call>", "").replace("\n", "")
        parts = {name.strip(): value for name, value in row["parts"].items()}
        assert texts(page, f"[data-row='{card.get_attribute('data-row')}'] .parts dt") == list(parts)


def test_tool_calls_and_results_stand_between_the_turns_that_they_came_in(pages: Pages) -> None:
    found = pages.api("tools", "rollouts?flag=tool_calls&limit=1")["rows"][0]
    row = pages.api("tools", f"rollouts/{found['step']}/{found['row']}")
    page = pages.open("tools", f"?step={found['step']}&group={found['group']}&row={found['row']}")
    events = page.locator(f".sample[data-row='{found['row']}'] .event")
    spoken = [entry for entry in row["trace"] if entry["turn"] > 0]
    assert [text.split()[0] for text in events.all_inner_texts()] == [entry["role"] for entry in spoken]
    call = next(entry for entry in spoken if entry["role"] == "tool")
    shown = page.locator(f".sample[data-row='{found['row']}'] .event--tool").first.inner_text()
    assert call["name"] in shown
    assert call["content"] in shown
    assert all(str(value) in shown for value in call["arguments"].values())
    turns = events.locator(".tokens").all()
    assert [turn.locator(".tok").count() for turn in turns] == row["turn_lengths"]


def test_each_token_says_what_is_known_of_it_to_mouse_and_keyboard(pages: Pages) -> None:
    page = pages.open("tools", "?step=3&group=0")
    row = pages.api("tools", "steps/3/groups/0")["rows"][0]
    advantage = row.get("token_advantages", [row["advantage"]] * 3)[2]
    page.locator(".sample").first.locator(".tok").nth(2).hover()
    info = page.locator("#token-info").inner_text().split("\n")
    shown = dict(zip(info[::2], info[1::2], strict=True))
    assert shown["id"] == str(row["tokens"][2])
    assert number(shown["logprob"]) == pytest.approx(row["logprobs"][2], abs=1e-4)
    assert number(shown["advantage"]) == pytest.approx(advantage, abs=1e-3)
    page.mouse.move(5, 5)
    page.locator(".tokens").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert f"2 of {len(row['tokens'])}" in page.locator("#token-info").inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#token-info").is_visible()


def test_tokens_take_the_colour_that_is_asked_for_and_entropy_says_why_it_cannot(pages: Pages) -> None:
    row = pages.api("hostile", "steps/1/groups/0")["rows"][0]
    page = pages.open("hostile", "?step=1&group=0")
    first = page.locator(f".sample[data-row='{row['row']}'] .tok").first
    sign = "neg" if row["advantage"] < 0 else "pos"
    assert f"{sign}-5" in first.get_attribute("class")
    page.keyboard.press("2")  # p = 0.905 is nothing to point at
    assert first.get_attribute("class") == "tok"
    page.keyboard.press("3")
    assert "no entropies" in page.locator("#legend").inner_text()
    assert page.locator("#colours [aria-pressed=true]").inner_text() == "entropy"
    page.keyboard.press("1")
    assert f"{sign}-5" in first.get_attribute("class")
    assert texts(page, "#legend span")


def test_what_the_policy_wrote_is_shown_and_never_obeyed(pages: Pages) -> None:
    page = pages.open("hostile", "?step=1&group=0")
    samples = page.locator(".sample")
    assert samples.count() == len(HOSTILE)
    assert "<script>HACKED = 1</script></main><img" in samples.nth(0).locator(".tokens").inner_text()
    assert texts(page, ".sample[data-row='1'] .tokens .unseen") == ["ESC", "ESC", "BEL", "NUL", "U+009B"]
    marks = ["RLO", "PDF", "RLM", "ZWSP", "BOM", "LRI", "U+E0041", "CR", "⏎", "⇥"]
    assert texts(page, ".sample[data-row='2'] .tokens .unseen") == marks
    joined = [text for text in samples.nth(3).locator(".tok").all_text_contents() if text.strip()]
    assert joined == ["one ", EMOJI.decode(), " and ", "\ufffd", " none"]
    assert page.locator("#samples script, #samples img, .prompt script").count() == 0
    assert not set("\u202e\u2066\x1b\x00") & set(page.locator("body").text_content())
    facts = samples.nth(0).locator(".facts-line").inner_text()
    assert "<i>" in facts
    assert "half" in facts


def test_very_long_completions_come_in_parts_and_stay_in_their_cards(pages: Pages) -> None:
    page = pages.open("hostile", "?step=1&group=0")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert len(page.locator(".sample[data-row='4'] .tokens").inner_text()) == len(LONG)
    many = page.locator(".sample[data-row='5']")
    assert many.locator(".tok").count() == 400
    assert "5,600 tokens to go" in many.locator(".more").inner_text()
    many.locator(".more").click()
    wait_until(lambda: many.locator(".tok").count() == 2_000)
    many.locator(".more").click()  # a card never holds more than a window
    wait_until(lambda: many.locator(".tok").first.inner_text() == "word1000")
    assert many.locator(".tok").count() == 2_000
    assert "2,000 tokens to go" in many.locator(".more").last.inner_text()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_link_brings_every_choice_back_and_back_undoes_it(pages: Pages) -> None:
    page = pages.open("tools", "?step=2&group=1&colour=logprob")
    page.wait_for_selector(".sample[data-row]")  # not those that the server wrote for readers without scripts
    page.keyboard.press("j")
    page.keyboard.press("j")
    second = page.locator(".sample").nth(1).get_attribute("data-row")
    wait_until(lambda: f"row={second}" in page.evaluate("location.href"))
    page.keyboard.press("]")
    wait_until(lambda: "Step 3" in page.locator("#stage-head h2").inner_text())
    page.go_back()
    wait_until(lambda: page.locator("#stage-head h2").inner_text() == "Step 2 · group 1")
    again = page.context.new_page()
    again.goto(page.url)
    again.wait_for_selector(".sample.is-current")
    assert again.locator(".sample.is-current").get_attribute("data-row") == second
    assert again.locator("#colours [aria-pressed=true]").inner_text() == "logprob"
    assert again.locator("#step-number").input_value() == "2"
    page.keyboard.press("J")
    wait_until(lambda: "group=1" in page.evaluate("location.href"))  # the last group stays the last


def test_a_filter_finds_over_all_steps_and_its_export_holds_the_same(pages: Pages) -> None:
    everything = pages.api("tools", "rollouts?limit=500")["rows"]
    page = pages.open("tools")
    page.keyboard.press("/")
    page.keyboard.type("answer")
    page.keyboard.press("Enter")
    expected = [row for row in everything if "answer" in row["text"].lower()]
    wait_until(lambda: texts(page, "#list-title") == [f"{len(expected)} found"])
    assert texts(page, "#entries mark")[:1] == ["answer"]
    page.locator("#finder-more summary").click()
    page.locator(".flag[data-flag=duplicate]").click()
    page.locator(".flag[data-flag=duplicate]").click()
    fresh = [row for row in expected if "duplicate" not in row["flags"]]
    wait_until(lambda: texts(page, "#list-title") == [f"{len(fresh)} found"])
    assert "without=duplicate" in page.url
    link = page.locator("#export").get_attribute("href")
    exported = [json.loads(line) for line in pages.client.get(link).raise_for_status().text.splitlines()]
    assert Counter(row["text"][:400] for row in exported) == Counter(row["text"] for row in fresh)
    page.locator("[aria-label='Remove text: answer']").click()
    rest = [row for row in everything if "duplicate" not in row["flags"]]
    wait_until(lambda: texts(page, "#list-title") == [f"{len(rest)} found"])
    first = page.locator("#entries .entry.is-current")
    page.keyboard.press("j")
    wait_until(
        lambda: (
            f"row={rest[1]['row']}" in page.evaluate("location.href")
            and f"step={rest[1]['step']}" in page.evaluate("location.href")
        )
    )
    assert first.count() == 1
    page.keyboard.press("2")
    page.locator("#entries .entry").nth(2).click()
    wait_until(lambda: f"row={rest[2]['row']}" in page.evaluate("location.href"))
    assert "colour=logprob" in page.url  # a choice made since the list was drawn


def test_one_prompt_is_followed_through_training(pages: Pages) -> None:
    item = pages.api("tools", "steps/1/groups")["groups"][0]["item"]
    visits = pages.api("tools", f"items/{item}")["visits"]
    page = pages.open("tools", "?step=1&group=0")
    page.keyboard.press("t")
    wait_until(lambda: page.locator(".visit").count() == len(visits))
    picked = sorted({visits[place]["step"] for place in (0, (len(visits) - 1) // 2, -1)})
    assert texts(page, ".column-title a") == [f"Step {step}" for step in picked]
    unfold(page)
    rewards = sorted(
        (reward for visit in visits if visit["step"] == picked[-1] for reward in visit["rewards"]), reverse=True
    )
    assert [number(text) for text in texts(page, ".column:last-child .sample-reward")] == [
        round(one, 3) for one in rewards
    ]
    page.locator(".column-title a").last.click()
    wait_until(lambda: page.locator("#stage-head h2").inner_text().startswith(f"Step {picked[-1]} "))


def test_each_new_step_is_shown_to_who_follows_the_run(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "runs" / "live"
    write_hostile(folder, planned=4)
    write_process(folder, began_at=time.time())
    with showing(tmp_path / "home") as (_, client):
        context = browser.new_context()
        pages = Pages(context.new_page(), client)
        page = pages.open("live")
        page.keyboard.press("f")
        wait_until(lambda: page.locator("#live[data-state=live]").is_visible())
        for step in (2, 3):
            append(folder, "rollouts.jsonl", *(rollout(step, place) for place in range(3)))
            append(folder, "metrics.jsonl", metrics(step))
            wait_until(lambda step=step: page.locator("#stage-head h2").inner_text().startswith(f"Step {step} "))
        assert page.locator("#step-last").inner_text() == "of 3"
        assert "follow=1" in page.url
        pages.check()
        context.close()


def test_a_group_that_could_not_be_sampled_says_so(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "runs" / "failed"
    write_hostile(folder)
    failed = {"step": 2, "group": 0, "item": 9, "sample": "Question", "error": "the sampler ran out of memory"}
    append(folder, "rollouts.jsonl", failed)
    append(folder, "metrics.jsonl", metrics(2))
    with showing(tmp_path / "home") as (_, client):
        context = browser.new_context()
        pages = Pages(context.new_page(), client)
        page = pages.open("failed", "?step=2")
        assert "the sampler ran out of memory" in page.locator(".sample").inner_text()
        assert page.locator("#entries .tag--error").count() == 1
        pages.check()
        context.close()


def test_every_character_that_cannot_be_seen_has_a_name(pages: Pages) -> None:
    page = pages.open("tools")
    shown = page.evaluate(
        """async (codes) => {
            const { visible } = await import("/assets/tokens.js");
            return codes.map((code) => visible(String.fromCodePoint(code)));
        }""",
        [0, 7, 0x1B, 0x7F, 0x85, 0xAD, 0x200B, 0x200F, 0x202E, 0x2028, 0x2067, 0xFEFF, 0xD800, 0xDFFF, 0xE0041],
    )
    names = ["NUL", "BEL", "ESC", "DEL", "U+0085", "SHY", "ZWSP", "RLM", "RLO", "LSEP", "RLI", "BOM"]
    names += ["U+D800", "U+DFFF", "U+E0041"]
    assert shown == [[{"text": name, "mark": True}] for name in names]
    family = "👩\u200d🔬 שלום ok"
    assert page.evaluate("async (text) => (await import('/assets/tokens.js')).visible(text)", family) == [
        {"text": family, "mark": False}
    ]
