"""Tasks of packages that are no part of an installation: games of textarena, constraints of IFEval."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mint
from mint.recipes.task_registry import load_task

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "textarena==0.7.4", "chess", "if-verifiable==0.1.2", "emoji", "immutabledict", "langdetect", "nltk", "six",
    "syllapy",
)  # fmt: skip
"""With what they need beyond this environment's own packages."""

USE_THEM = """
import json, random, sys
from pathlib import Path
import mint
from mint.errors import InvalidRequestError
from mint.recipes.task_registry import load_task
from mint.rl import run_grpo

folder = Path(sys.argv[1])
before = random.getstate()
game = load_task(
    "textarena:GuessTheNumber-v0", heldout_size=8, train_size=64, instruction=" One number.", max_turns=2
).adapter
text = load_task("ifeval:change_case:english_capital,startend:quotation", train_size=64, heldout_size=8).adapter
train, heldout = game.build_dataset(), game.build_heldout()

def play(item, moves):
    env = game.make_env(item)
    said = [env.initial_observation()[0]["content"]]
    for move in moves:
        result = env.step({"role": "assistant", "content": move})
        if result.episode_done:
            return said, result.reward, dict(result.metrics)
        said.append(result.next_messages[0]["content"])
    return said, None, {}

found = next(number for number in range(1, 21) if play(train[0], [f"[{number}]"])[1] == 1)
wrong = [20, 19, 18] if found < 10 else [1, 2, 3]
questions = text.build_dataset()
first = {name: next(each for each in questions if each.answer == name) for name in {each.answer for each in questions}}
capital, quotation = first["change_case:english_capital"], first["startend:quotation"]
everything = load_task("ifeval:all", train_size=200).adapter.build_dataset()
refusals = []
for name in ("textarena:Nothing-v0", "textarena:TicTacToe-v0", "ifeval:no:such"):
    try:
        load_task(name)
    except InvalidRequestError as error:
        refusals.append(str(error))
unchanged = random.getstate() == before
config = load_task("math").config.changed(steps=1, batch_size=2, group_size=2, max_tokens=8, heldout_size=2)
with mint.ServiceClient(data_dir=folder / "service") as service:
    runs = [run_grpo(task, config.changed(run_dir=folder / name), service_client=service)
            for name, task in (("game", game), ("text", text))]
errors = [row["error"] for name in ("game", "text") for row in
          map(json.loads, (folder / name / "rollouts.jsonl").read_text().splitlines())]
print(json.dumps({
    "sizes": [len(train), len(heldout)], "apart": not {one.seed for one in train} & {one.seed for one in heldout},
    "same": [one.seed for one in game.build_heldout()] == [one.seed for one in heldout],
    "right": play(train[0], [str(found)]), "bare": play(train[0], [f" {found} "])[1],
    "late": play(train[0], [f"[{number}]" for number in wrong]),
    "twice": play(train[0], ["nothing", "nothing"]),
    "hint": "lower" if wrong[0] > found else "higher",
    "prompts": [capital.prompt, quotation.prompt],
    "graded": [text.compute_reward(*pair) for pair in (
        ("THE BOAT IS IN THE HARBOR.", capital), ("The boat is in the harbor.", capital),
        ('"A boat."', quotation), ("A boat.", quotation), ("  ", quotation))],
    "kinds": len({each.answer for each in everything}), "distinct": len({each.text for each in everything}),
    "refusals": refusals, "unchanged": unchanged, "errors": [one for one in errors if one],
    "samples": [run.samples for run in runs],
}))
"""


@pytest.mark.parametrize(("name", "extra"), [("textarena:GuessTheNumber-v0", "textarena"), ("ifeval:all", "ifeval")])
def test_a_missing_package_is_named_with_its_extra(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    monkeypatch.setitem(sys.modules, "if_verifiable", None)
    with pytest.raises(mint.errors.MissingExtraError, match=rf"pip install .*\[{extra}\]'"):
        load_task(name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_games_and_constraints_of_the_real_packages_run_through_our_loop(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), *PACKAGES]
    installed = subprocess.run(install, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"no package registry: {installed.stderr[-300:]}")
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{site}", "PATH": "/usr/bin:/bin", "MINT_HOME": str(tmp_path / "home")}
    ran = subprocess.run(
        [sys.executable, "-c", USE_THEM, str(tmp_path)], capture_output=True, text=True, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert (seen["sizes"], seen["apart"], seen["same"]) == ([64, 8], True, True)
    opening, reward, metrics = seen["right"]
    assert "guess the number between 1 and 20 within 2 turns" in opening[0]
    assert opening[0].endswith(" One number.")
    assert (reward, metrics, seen["bare"]) == (1.0, {"invalid_move": 0}, 1.0)
    said, reward, _ = seen["late"]
    assert said[1] == f"The target number is {seen['hint']}."
    assert 0 < reward < 1
    assert seen["twice"][1:] == [0.0, {"invalid_move": 1}]
    assert all("Write one short sentence" in prompt for prompt in seen["prompts"])
    assert "all capital letters" in seen["prompts"][0]
    assert "double quotation marks" in seen["prompts"][1]
    assert seen["graded"] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert seen["kinds"] > 20
    assert seen["distinct"] == 200
    assert "cannot be set up for one player" in seen["refusals"][0]
    assert "cannot be set up for one player" in seen["refusals"][1]
    assert "is not a constraint of IFEval" in seen["refusals"][2]
    assert seen["unchanged"]
    assert (seen["errors"], seen["samples"]) == ([], [4, 4])
