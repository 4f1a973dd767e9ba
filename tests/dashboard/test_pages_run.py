"""The list of runs and the page of a run as the server writes them: the numbers of the folder, before any script runs,
and nothing that a run holds becomes markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

import mint.dashboard
from mint.dashboard import pages
from tests.dashboard.dashboard_harness import API, append, evaluation, finding, showing, write_run

ASSETS = Path(mint.dashboard.__file__).parent / "assets"
OWN_SCRIPTS = sorted(path for path in ASSETS.glob("*.js") if path.name != "uplot.js")
MARKUP = '<img src=x onerror="alert(1)">'
STEPS = 6
VOID = frozenset({"meta", "link", "input", "img", "br", "hr"})


class Page(HTMLParser):
    """The elements of a page: tag, attributes, and all of the text inside."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[int] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self.elements[self._open.pop()][0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for place in self._open:
            self.elements[place][2].append(data)

    def find(self, tag: str, **wanted: str) -> list[tuple[dict[str, str], str]]:
        """The elements with these attributes (`data_cell` for `data-cell`), as attributes and text."""
        names = {name.replace("_", "-"): value for name, value in wanted.items()}
        return [
            (attributes, " ".join("".join(text).split()))
            for found, attributes, text in self.elements
            if found == tag and all(attributes.get(name) == value for name, value in names.items())
        ]

    def cells(self) -> dict[str, str]:
        """Texts by `data-cell`; of several the first."""
        found: dict[str, str] = {}
        for _, attributes, text in self.elements:
            if "data-cell" in attributes:
                found.setdefault(attributes["data-cell"], " ".join("".join(text).split()))
        return found


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("home")
    first = write_run(home / "runs" / "first", STEPS, planned=10)
    append(first, "evaluations.jsonl", {**evaluation(0, 0.25), "when": "before"}, evaluation(STEPS, 0.75))
    append(first, "findings.jsonl", finding(), {**finding("collapse", 4), "severity": "error", "evidence": MARKUP})
    write_run(home / "runs" / "second & <b>", 2, task=MARKUP)
    with showing(home) as (_, client):
        yield client


def page(client: httpx.Client, path: str) -> Page:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return Page(answer.text)


def summary(client: httpx.Client, name: str) -> dict[str, Any]:
    return client.get(f"{API}/runs/{name}").json()["summary"]


def test_the_list_has_a_row_for_each_run_with_the_numbers_of_its_folder(client: httpx.Client) -> None:
    html = client.get("/").text
    table = html[html.index("<tbody") : html.index("</tbody>")]
    rows = {row.find("tr")[0][0]["data-run"]: row for row in map(Page, re.findall(r"<tr.*?</tr>", table, re.DOTALL))}
    assert rows.keys() == {"first", "second & <b>"}
    cells = rows["first"].cells()
    assert cells["step"] == f"{STEPS} / 10"
    assert cells["reward"] == f"{STEPS / 10:.3f}" == cells["best"]
    assert cells["success"] == f"{100 * STEPS / 20:.1f} %"
    assert (cells["heldout"], cells["interval"]) == ("0.750", "[0.650, 0.850]")
    assert cells["state"] == summary(client, "first")["state"]
    assert rows["first"].find("a", data_cell="findings")[0][1] == "1 1"  # an error, then a warning
    assert rows["second & <b>"].cells()["task"] == MARKUP
    assert rows["second & <b>"].find("a", data_cell="name")[0][0]["href"] == "/runs/second%20%26%20%3Cb%3E"


def test_the_headline_of_a_run_has_the_numbers_of_its_folder(client: httpx.Client) -> None:
    cells = page(client, "/runs/first").cells()
    assert cells["step"] == f"{STEPS} / 10"
    assert cells["success"] == f"{100 * STEPS / 20:.1f} %"
    assert cells["reward"] == cells["best"] == f"{STEPS / 10:.3f}"
    assert (cells["heldout"], cells["interval"]) == ("0.750", "[0.650, 0.850]")
    assert cells["gain"] == "from 0.250 (+0.500)"


def test_findings_stand_under_the_headline_and_lead_to_the_diagnosis(client: httpx.Client) -> None:
    links = page(client, "/runs/first").find("ul", id="findings")
    assert links[0][1] == f"truncation step 2 33% collapse step 4 {MARKUP}"
    anchors = [attributes["href"] for attributes, _ in page(client, "/runs/first").find("a", title="More")]
    assert anchors == ["/runs/first/diagnosis#truncation", "/runs/first/diagnosis#collapse"]


def test_a_run_without_evaluations_and_findings_has_dashes(client: httpx.Client) -> None:
    shown = page(client, "/runs/second & <b>")
    assert (shown.cells()["heldout"], shown.cells()["interval"], shown.cells()["gain"]) == ("–", "", "")
    assert shown.find("ul", id="findings")[0][1] == ""


def test_settings_are_listed_as_they_are_in_the_config(client: httpx.Client) -> None:
    shown = page(client, "/runs/second & <b>")
    values = dict(zip([text for _, text in shown.find("dt")], [text for _, text in shown.find("dd")], strict=True))
    config = client.get(f"{API}/runs/second & <b>").json()["config"]
    assert {name: values[name] for name in config} == {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in config.items()
    }


def test_a_run_names_the_implementation_of_its_base_model_and_lists_what_took_effect(tmp_path: Path) -> None:
    effective = {"implementation": "transformers", "dtype": "bfloat16", "trained_modules": ["q_proj", MARKUP]}
    for name, settings in (("own", {"implementation": "mint"}), ("other", effective), ("old", None)):
        folder = write_run(tmp_path / "runs" / name, 1)
        if settings is not None:
            (folder / "effective.json").write_text(json.dumps(settings))
    with showing(tmp_path) as (_, client):
        own, other, old = (page(client, f"/runs/{name}") for name in ("own", "other", "old"))
        assert client.get(f"{API}/runs/other").json()["effective"] == effective
        assert MARKUP not in client.get("/runs/other").text
    assert own.cells()["implementation"] == "mint's decoder"
    assert other.cells()["implementation"] == "transformers"
    assert "implementation" not in old.cells()
    values = dict(zip([text for _, text in other.find("dt")], [text for _, text in other.find("dd")], strict=True))
    assert values["dtype"] == "bfloat16" and json.loads(values["trained_modules"]) == ["q_proj", MARKUP]


def test_scripts_are_told_which_runs_a_page_shows(client: httpx.Client) -> None:
    [(alone, _)] = page(client, "/runs/first").find("main")
    assert (alone["data-run"], json.loads(alone["data-runs"])) == ("first", ["first"])
    query = httpx.QueryParams([("run", "second & <b>"), ("run", "first")])
    [(compared, text)] = page(client, f"/compare?{query}").find("main")
    assert (compared.get("data-run"), json.loads(compared["data-runs"])) == (None, ["second & <b>", "first"])
    assert "second & <b>" in text


@pytest.mark.parametrize("path", ["/", "/runs/first", "/runs/second & <b>", "/compare?run=first", "/login", "/nothing"])
def test_no_page_holds_a_script_or_style_of_its_own_and_all_that_it_names_is_there(
    client: httpx.Client, path: str
) -> None:
    html = client.get(path).text
    assert MARKUP not in html
    shown = Page(html)
    for tag, attributes, text in shown.elements:
        assert tag != "style"
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        if tag == "script":
            assert attributes["src"].startswith("/assets/") and not "".join(text).strip()
        named = attributes.get("src", "") if tag == "script" else attributes.get("href", "") if tag == "link" else ""
        assert not named or client.get(named).status_code == 200


def test_an_error_is_a_page_that_says_what_was_wrong(client: httpx.Client) -> None:
    answer = client.get("/runs/<b>none")
    assert answer.status_code == 404
    assert "<b>none" not in answer.text
    assert "is not a run here" in Page(answer.text).find("main")[0][1]


def test_the_login_says_what_was_wrong_with_the_key_and_goes_on_to_where_one_came_from() -> None:
    html = pages.login_page(asks_keys=True, place="/runs/a?step=1", problem=MARKUP)
    shown = Page(html)
    [(form, _)] = shown.find("form", method="post")
    assert form["action"] == "/login?next=%2Fruns%2Fa%3Fstep%3D1"
    assert shown.find("p", id="login-problem")[0][1] == MARKUP
    assert MARKUP not in html


# --- assets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", OWN_SCRIPTS, ids=lambda path: path.name)
def test_scripts_make_text_of_data_and_ask_nobody_else(script: Path) -> None:
    text = script.read_text()
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert forbidden not in text
    assert not re.findall(r'["\'`]https?://(?!www\.w3\.org/2000/svg)', text)
    imported = re.findall(r'from "\./([a-z_]+\.js)"', text)
    assert all((ASSETS / name).is_file() for name in imported)


def test_the_charting_library_is_the_one_that_its_notice_is_for() -> None:
    assert "uPlot (v1.6.32)" in (ASSETS / "uplot.js").read_text()[:400].replace(
        "https://github.com/leeoniya/uPlot", "uPlot"
    )
    assert "The MIT License" in (ASSETS / "uplot.LICENSE").read_text()


Color = tuple[float, float, float]
COLORS = {
    name: (light, dark)
    for name, light, dark in re.findall(
        r"--([a-z0-9-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", (ASSETS / "base.css").read_text()
    )
}
GROUNDS = ("bg", "panel", "sunken", "hover", "select")


def color(name: str, theme: int) -> Color:
    text = COLORS[name][theme]
    red, green, blue = (int(text[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return red, green, blue


def mixed(top: Color, ground: Color, share: float) -> Color:
    red, green, blue = (share * above + (1 - share) * below for above, below in zip(top, ground, strict=True))
    return red, green, blue


def contrast(one: Color, other: Color) -> float:
    """As WCAG 2 has it, from relative luminances."""

    def luminance(rgb: Color) -> float:
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["text", "muted", "accent", "error", "warning", "info", "good"])
def test_text_can_be_read_on_every_ground(name: str, theme: int) -> None:
    for ground in GROUNDS:
        assert contrast(color(name, theme), color(ground, theme)) >= 4.5, ground


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_coloured_tokens_buttons_and_lines_can_be_seen(theme: int) -> None:
    text, panel = color("text", theme), color("panel", theme)
    for sign in ("pos", "neg"):
        assert contrast(text, mixed(color(sign, theme), panel, 0.5)) >= 4.5
        assert contrast(color(sign, theme), panel) >= 3
    assert contrast(color("on-accent", theme), color("accent", theme)) >= 4.5
    for line in range(1, 9):
        assert contrast(color(f"line-{line}", theme), panel) >= 3
    for border in ("bg", "panel"):
        assert contrast(color("line-strong", theme), color(border, theme)) >= 3
