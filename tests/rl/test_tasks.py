"""Tasks by name: what each name gives, that nothing held out is trained on, and errors that say where to look."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import mint
from mint.errors import InvalidRequestError
from mint.recipes.math import MathAdapter
from mint.recipes.question_task import Question, encode_prompt, one_side
from mint.recipes.task_registry import load_task, open_task, open_task_of_run
from mint.recipes.task_sources.files import FileAdapter
from mint.rl import RLAdapter, run_grpo
from mint.rl.heldout_evaluation import content_hash, without_heldout

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with mint.ServiceClient(data_dir=tmp_path_factory.mktemp("service")) as client:
        return client.create_sampling_client(base_model="mint/tiny").get_tokenizer()


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# --- names -------------------------------------------------------------------------------------------------------


def test_a_recipe_is_loaded_by_its_name_with_its_settings_and_the_seed() -> None:
    choice = load_task("math", seed=3, train_size=10)
    assert isinstance(choice.adapter, MathAdapter)
    assert (choice.config.base_model, choice.config.seed) == ("mint/tiny", 3)
    assert len(choice.adapter.build_dataset()) == 10


@pytest.mark.parametrize("name", ["maths", "reasoning_gym:", "nowhere.at.all:Task", "no_such_file.py:Task"])
def test_an_unknown_name_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"reasoning_gym:NAME, file:PATH, verifiers:NAME") as caught:
        load_task(name)
    assert name.rstrip(":") in str(caught.value)


def test_an_unknown_option_is_refused_with_those_that_exist() -> None:
    with pytest.raises(InvalidRequestError, match="Its options are seed, heldout_size, train_size"):
        load_task("math", trian_size=10)


def test_a_class_of_ones_own_is_a_task_by_module_or_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        from __future__ import annotations
        from dataclasses import dataclass
        from mint.rl import RLAdapter

        @dataclass
        class Item:
            text: str

        class Echo(RLAdapter):
            def __init__(self, word: str = "yes") -> None:
                self.word = word
            def build_dataset(self): return [Item(self.word)]
            def make_prompt(self, sample, tokenizer): return tokenizer.encode(sample.text)
            def compute_reward(self, response, sample): return float(sample.text in response)
    """
    path = tmp_path / "own_echo_task.py"
    path.write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MINT_BASE_MODEL", "mint/tiny")
    by_file, by_module = load_task(f"{path}:Echo", word="no"), load_task("own_echo_task:Echo", seed=4)
    assert [by_file.adapter.build_dataset()[0].text, by_module.adapter.build_dataset()[0].text] == ["no", "yes"]
    assert (by_module.config.base_model, by_module.config.seed) == ("mint/tiny", 4)
    with pytest.raises(InvalidRequestError, match="has no class Ecko"):
        load_task(f"{path}:Ecko")


def test_a_task_file_imports_the_files_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("MINT_BASE_MODEL", "mint/tiny")
    (tmp_path / "words_beside_it.py").write_text("WORDS = ['yes']")
    source = """
        from words_beside_it import WORDS
        from mint.rl import RLAdapter

        class Says(RLAdapter):
            def build_dataset(self): return WORDS
            def make_prompt(self, item, tokenizer): return tokenizer.encode(item)
            def compute_reward(self, response, item): return float(item in response)
    """
    (tmp_path / "says.py").write_text(textwrap.dedent(source))
    assert load_task(f"{tmp_path / 'says.py'}:Says").adapter.build_dataset() == ["yes"]


@pytest.mark.parametrize(
    ("lines", "name", "said"),
    [
        (
            "class Echo(RLAdapter):\n    pass",
            "{path}",
            r"does not name a class of this file\. Name it: .*task\.py:Echo",
        ),
        ("def f(:", "{path}", r"Name it: .*task\.py:Class"),
        ("def f(:", "{path}:Echo", r"cannot be loaded \(SyntaxError: .*`python .*task\.py` shows where"),
        ("import pandasx", "{path}:Echo", r"cannot be loaded \(ModuleNotFoundError: No module named 'pandasx'\)"),
        ("", "{path}x.py:Echo", "is not a file"),
    ],
)
def test_a_file_that_is_no_task_yet_is_told_what_it_lacks(lines: str, name: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_text(f"from mint.rl import RLAdapter\n{lines}\n")
    with pytest.raises(InvalidRequestError, match=said):
        load_task(name.format(path=path))


# --- prompts -----------------------------------------------------------------------------------------------------


def test_a_text_goes_through_the_chat_template_or_as_it_is(tokenizer: Any) -> None:
    plain, chat = encode_prompt("Hello", tokenizer, "plain"), encode_prompt("Hello", tokenizer, "chat")
    assert tokenizer.decode(plain) == "Hello"
    assert tokenizer.decode(chat) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert encode_prompt([{"role": "user", "content": "Hello"}], tokenizer, "plain") == chat


def test_messages_for_a_model_without_a_template_are_refused_and_text_is_not(tokenizer: Any) -> None:
    class Bare:
        chat_template = None
        encode = tokenizer.encode

    assert encode_prompt("Hello", Bare(), "chat") == tokenizer.encode("Hello")
    with pytest.raises(InvalidRequestError, match="no chat template"):
        encode_prompt([{"role": "user", "content": "Hello"}], Bare(), "chat")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{% for message in messages %}", "Unexpected end of template"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
    ],
)
def test_a_chat_template_that_fails_is_a_refusal_that_names_the_model(
    template: str, reason: str, tokenizer: Any
) -> None:
    class Failing:
        chat_template = template
        name_or_path = "my/model"

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return tokenizer.apply_chat_template(messages, chat_template=template, **options)

    with pytest.raises(InvalidRequestError, match=rf"base_model = my/model: .* of system, user \({reason}"):
        encode_prompt([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], Failing(), "chat")


def test_the_same_question_never_crosses_the_split_whatever_its_answer() -> None:
    questions = [Question(f"What is {number}?", str(answer)) for number in range(400) for answer in (1, 2)]
    train, heldout = (one_side(questions, heldout=side, share=0.25) for side in (False, True))
    assert not {each.text for each in train} & {each.text for each in heldout}
    assert len(train) + len(heldout) == 400
    assert 70 < len(heldout) < 130


# --- reasoning-gym -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "time_intervals"])
def test_a_reasoning_gym_answer_scores_1_and_junk_scores_0(name: str) -> None:
    pytest.importorskip("reasoning_gym")
    adapter = load_task(f"reasoning_gym:{name}", train_size=20, heldout_size=5).adapter
    for question in adapter.build_dataset():
        assert adapter.compute_reward(f" {question.answer}\n", question) == 1.0
        assert adapter.compute_reward(f"So <answer>no</answer> <answer> {question.answer} </answer>", question) == 1.0
        assert adapter.compute_reward("flowers", question) == 0.0  # countdown itself gives .01
        assert adapter.compute_reward("", question) == 0.0


def test_reasoning_gym_train_and_held_out_are_disjoint_for_every_seed_and_the_held_out_set_is_fixed() -> None:
    pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "train_size": 400, "heldout_size": 60}
    tasks = [load_task("reasoning_gym:chain_sum", seed=seed, **options).adapter for seed in range(3)]
    heldout = [{content_hash(task, each) for each in task.build_heldout()} for task in tasks]
    assert heldout[0] == heldout[1] == heldout[2]
    assert len(heldout[0]) > 20  # one-digit sums are few: the generator is given up when it only repeats itself
    for task in tasks:
        assert without_heldout(task, task.build_dataset(), tasks[0].build_heldout())[1] == 0


def test_reasoning_gym_says_what_it_refuses() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(InvalidRequestError, match=r"is not a reasoning-gym task.*chain_sum"):
        load_task("reasoning_gym:chain_some")
    with pytest.raises(InvalidRequestError, match="refused by reasoning-gym"):
        load_task("reasoning_gym:chain_sum", min_terms=5, max_terms=2)
    with pytest.raises(InvalidRequestError, match="refused by reasoning-gym"):
        load_task("reasoning_gym:chain_sum", terms=2)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(mint.errors.MissingExtraError, match=r"pip install .*\[tasks\]'"):
        load_task("reasoning_gym:chain_sum")
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(mint.errors.MissingExtraError, match=r"pip install .*\[verifiers\]'"):
        load_task("verifiers:anything")


def test_run_grpo_trains_on_a_reasoning_gym_task(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    choice = load_task("reasoning_gym:chain_sum", prompt_style="plain", max_terms=2, max_digits=2, heldout_size=16)
    config = choice.config.changed(steps=1, batch_size=8, run_dir=tmp_path / "run", heldout_size=16)
    with mint.ServiceClient(data_dir=tmp_path / "service") as service:
        result = run_grpo(choice.adapter, config, service_client=service)
    assert result.samples == 64
    assert result.heldout_after[0.0].n == 16


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, 3e-3),
        ({"base_model": "mint/tiny"}, 3e-3),
        ({"base_model": "Qwen/Qwen3-0.6B"}, 2e-5),
        ({"base_model": "Qwen/Qwen3-0.6B", "learning_rate": "1e-4"}, 1e-4),
    ],
)
def test_another_model_does_not_get_the_rate_of_the_bundled_one(words: dict[str, str], expected: float) -> None:
    with open_task("math", words) as choice:
        assert choice.config.learning_rate == expected
        assert choice.config.max_tokens == 8


def test_the_learning_rate_of_the_environment_is_taken_for_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_RL_LR", "5e-5")
    with open_task("math", {"base_model": "Qwen/Qwen3-0.6B"}) as choice:
        assert choice.config.learning_rate == 5e-5


# --- mixtures of reasoning-gym ----------------------------------------------------------------------------------

MIXED = "reasoning_gym:chain_sum*2+leg_counting"


def test_several_reasoning_gym_tasks_are_named_with_their_weights() -> None:
    options = {"train_size": 30, "heldout_size": 6, "chain_sum.max_terms": 2, "prompt_style": "plain"}
    task = load_task(MIXED, seed=1, **options).adapter
    counts = Counter(task.category(item) for item in task.build_dataset())
    assert counts["chain_sum"] == 2 * counts["leg_counting"] == 60
    assert Counter(task.category(item) for item in task.build_heldout()) == {"chain_sum": 6, "leg_counting": 6}
    sums = [item for item in task.build_dataset() if item.task == "chain_sum"]
    assert all(len(re.findall(r"\d+", item.item.prompt)) == 2 for item in sums), "its own option"
    assert isinstance(task, RLAdapter)
    assert task.compute_reward(sums[0].item.answer, sums[0]) == 1.0
    assert task.spec == {"task": MIXED, "seed": 1, "options": options}


def test_a_mixture_trains_by_its_name_with_readings_of_each_task(tmp_path: Path) -> None:
    words = {"prompt_style": "plain", "train_size": 16, "chain_sum.max_terms": 2, "heldout_size": 4}
    with (
        open_task("reasoning_gym:chain_sum+gcd*0.5", words) as choice,
        mint.ServiceClient(data_dir=tmp_path / "service") as service,
    ):
        config = choice.config.changed(steps=1, batch_size=4, group_size=2, max_tokens=4, run_dir=tmp_path / "run")
        run_grpo(choice.adapter, config, service_client=service)
    readings = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert any("chain_sum" in name for name in readings)
    assert any("gcd" in name for name in readings)
    with open_task_of_run(tmp_path / "run", None) as again:
        assert {again.adapter.category(item) for item in again.adapter.build_heldout()} == {"chain_sum", "gcd"}


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("chainsum", {}, "Did you mean chain_sum"),
        ("chain_sum+leg_countin", {}, "leg_countin.*Did you mean leg_counting"),
        ("chain_sum*x", {}, r"Write reasoning_gym:chain_sum\*2\+gcd"),
        ("chain_sum*0+gcd", {}, "weights above 0"),
        ("chain_sum*-1+gcd", {}, "weights above 0"),
        ("chain_sum*inf+gcd", {}, "weights above 0"),
        ("gcd+gcd", {}, "different generators"),
        ("gcd+", {}, "different generators"),
        ("gcd+lcm", {"gdc.max_numbers": 3}, "gdc.max_numbers.*Did you mean gcd"),
        ("gcd+lcm", {"max_trems": 3}, "max_trems"),
    ],
)
def test_a_wrong_mixture_is_refused_with_what_would_be_right(
    name: str, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        load_task(f"reasoning_gym:{name}", **options)


# --- files -------------------------------------------------------------------------------------------------------


def test_a_jsonl_file_is_a_task(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"question": f"{number} plus 1?", "gold": number + 1} for number in range(200)]
    choice = load_task(f"file:{write_jsonl(tmp_path / 'sums.jsonl', rows)}", heldout=0.2, prompt_style="plain")
    task = choice.adapter
    assert len(task.build_dataset()) + len(task.build_heldout()) == 200
    assert 20 < len(task.build_heldout()) < 60
    first = task.build_dataset()[0]
    assert tokenizer.decode(task.make_prompt(first, tokenizer)) == first.prompt
    assert [task.compute_reward(f" {first.answer}\n", first), task.compute_reward("0", first)] == [1.0, 0.0]


def test_a_byte_order_mark_before_the_first_row_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_text('{"prompt": "a", "answer": "\\ud83d\\ude00"}\n', encoding="utf-8-sig")
    assert FileAdapter(path, heldout=0).build_dataset() == [Question("a", "\U0001f600")]


def test_messages_with_a_system_prompt_keep_their_roles(tmp_path: Path, tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    task = FileAdapter(write_jsonl(tmp_path / "chat.jsonl", [{"messages": messages, "answer": "Hello"}]), heldout=0)
    text = tokenizer.decode(task.make_prompt(task.build_dataset()[0], tokenizer))
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("grader", "answer", "right", "wrong"),
    [
        ("exact", "42", " 42\n", "42."),
        ("contains", "42", "It is 42.", "It is 24."),
        ("regex", r"^\s*(yes|ja)\b", " ja, bitte", "no, ja"),
        ("math", "1/2", "0.5", "0.25"),
    ],
)
def test_each_grader_tells_right_from_wrong(grader: str, answer: str, right: str, wrong: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "one.jsonl", [{"prompt": "?", "answer": answer}])
    task = FileAdapter(path, grader=grader, heldout=0)
    (question,) = task.build_dataset()
    try:
        assert [task.compute_reward(text, question) for text in (right, wrong)] == [1.0, 0.0]
    finally:
        task.close()


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"messages": [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": "4"}]}, 1),
        ({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 ="},
                       {"role": "assistant", "content": "5"}, {"role": "user", "content": "No."},
                       {"role": "assistant", "content": "4"}]}, 4),
        ({"prompt": [{"role": "user", "content": "2 + 2 ="}],
          "completion": [{"role": "assistant", "content": "4"}]}, 1),
        ({"prompt": "2 + 2 =", "completion": "4"}, None),
    ],
)  # fmt: skip
def test_the_rows_of_trl_for_supervised_training_are_read(row: Any, prompt: int | None, tmp_path: Path) -> None:
    (question,) = FileAdapter(write_jsonl(tmp_path / "rows.jsonl", [row]), heldout=0).build_dataset()
    assert question.answer == "4"
    assert question.prompt == ("2 + 2 =" if prompt is None else tuple((row.get("messages") or row["prompt"])[:prompt]))


@pytest.mark.parametrize(
    ("row", "options", "complaint"),
    [
        ("{not json", {}, r"bad\.jsonl:2 = .*is not JSON"),
        ({"text": "x", "answer": "1"}, {}, r"bad\.jsonl:2 = fields text, answer: has no field prompt or question"),
        ({"prompt": "x"}, {}, r"bad\.jsonl:2 = .*has no field answer or gold or solution.*answer_key"),
        ({"messages": [{"role": "assistant", "content": "y"}]}, {}, r"bad\.jsonl:2 = .*has no field answer or gold"),
        (
            {"prompt": "x", "completion": [{"role": "user", "content": "y"}]},
            {},
            r"answer = .*is not a text or a number",
        ),
        ({"prompt": "x", "answer": "1"}, {"answer_key": "label"}, r"bad\.jsonl:.*has no field label"),
        ({"prompt": 3, "answer": "1"}, {}, r"bad\.jsonl:2: prompt = 3: is neither a text nor"),
        ({"prompt": "x", "answer": None}, {}, r"bad\.jsonl:2: answer = .*is not a text or a number"),
        ({"prompt": "x", "answer": "("}, {"grader": "regex"}, r"bad\.jsonl:2: answer = .*is not a regular expression"),
        ("[1]", {}, r"bad\.jsonl:2 = .*is not an object"),
        ("[" * 100_000, {}, r"bad\.jsonl:2 = .*is not JSON"),
        ({"prompt": "a\ud83d", "answer": "1"}, {}, r"bad\.jsonl:2 = .*has half of a character, \\ud83d"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(
    row: Any, options: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "fine", "answer": "1"}, row])
    with pytest.raises(InvalidRequestError, match=complaint):
        FileAdapter(path, **options)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("gone.jsonl", {}, "does not exist"),
        ("here.jsonl", {"grader": "vibes"}, "is not a grader"),
        ("here.jsonl", {"heldout": 1.5}, "is not in"),
        ("here.jsonl", {"prompt_style": "shout"}, "is not a prompt style"),
    ],
)
def test_a_wrong_option_of_a_file_task_is_refused(
    name: str, options: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "here.jsonl", [{"prompt": "a", "answer": "b"}])
    with pytest.raises(InvalidRequestError, match=complaint):
        load_task(f"file:{tmp_path / name}", **options)


@pytest.mark.slow
def test_parquet_csv_and_saved_datasets_open_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = datasets.Dataset.from_list([{"prompt": f"q{number}", "answer": str(number)} for number in range(5)])
    data.to_parquet(str(tmp_path / "rows.parquet"))
    data.to_csv(str(tmp_path / "rows.csv"), index=False)
    data.save_to_disk(str(tmp_path / "saved"))
    for name in ("rows.parquet", "rows.csv", "saved"):
        task = FileAdapter(tmp_path / name, heldout=0)
        assert [(each.prompt, each.answer) for each in task.build_dataset()] == [(f"q{n}", str(n)) for n in range(5)]
    with pytest.raises(InvalidRequestError, match="cannot be opened"):
        FileAdapter(write_jsonl(tmp_path / "damaged.parquet", ["x"]))
    with pytest.raises(InvalidRequestError, match=r"cannot be opened by the datasets library .*EOF inside string"):
        FileAdapter(write_jsonl(tmp_path / "damaged.csv", ["prompt,answer", '"x']))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(InvalidRequestError, match="cannot be opened by the datasets library"):
        FileAdapter(tmp_path / "folder.jsonl")
    with pytest.raises(InvalidRequestError, match="has no ending that mint reads"):
        FileAdapter(write_jsonl(tmp_path / "rows.xyz", ["x"]))


# --- verifiers ---------------------------------------------------------------------------------------------------

TASKSETS = '''
"""A taskset and one that needs a runtime, as the package's users write them."""
import verifiers.v1 as vf

__all__ = ["ReverseTaskset"]

class ReverseData(vf.TaskData):
    answer: str

class ReverseTask(vf.Task[ReverseData]):
    @vf.reward(weight=0.75)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def letters(self, trace: vf.Trace) -> float:
        assert [message.role for message in trace.messages] == ["system", "user", "assistant"]
        return float(sorted(trace.last_reply) == sorted(self.data.answer))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

class ReverseConfig(vf.TasksetConfig):
    count: int = 10

class ReverseTaskset(vf.Taskset[ReverseTask, ReverseConfig]):
    def load(self):
        for number in range(self.config.count):
            text = f"{number:03d}"
            yield ReverseTask(
                ReverseData(prompt=f"Reverse: {text}", system_prompt="Be brief.", answer=text[::-1]), self.config.task
            )
'''

ENVIRONMENT = '''
"""A taskset with an environment of many turns, and one for two agents."""
import verifiers.v1 as vf

__all__ = ["HiddenTaskset", "HiddenEnv"]

class HiddenData(vf.TaskData):
    number: int

class HiddenTask(vf.Task[HiddenData]):
    @vf.reward(weight=0.5)
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.number))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

class HiddenConfig(vf.TasksetConfig):
    count: int = 10

class HiddenTaskset(vf.Taskset[HiddenTask, HiddenConfig]):
    def load(self):
        for number in range(self.config.count):
            yield HiddenTask(
                HiddenData(prompt="Guess my number.", system_prompt="Digits only.", number=number), self.config.task
            )

class HiddenEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class HiddenEnv(vf.Env[HiddenEnvConfig]):
    async def run(self, task, agents):
        HiddenEnv.playing += 1
        try:
            await self.play(task, agents)
        finally:
            HiddenEnv.playing -= 1

    playing = 0

    async def play(self, task, agents):
        guesses = 1
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.number) and guesses < 3:
                if not segment.last_reply.isdigit():
                    raise ValueError("no digits")
                guesses += 1
                hint = "higher" if int(segment.last_reply) < task.data.number else "lower"
                segment = await interaction.turn(f"It is {hint}.")
        interaction.trace.record_reward("speed", 1 / guesses, 0.5)
'''
TWO_AGENTS = ENVIRONMENT.replace("player: vf", "judge: vf.AgentConfig = vf.AgentConfig()\n    player: vf")

USE_THEM = """
import asyncio, json, sys
from pathlib import Path
import mint
from mint.recipes.task_registry import load_task
from mint.rl import run_grpo

choice = load_task("verifiers:reverse_taskset", count=40, heldout=0.25)
task, folder = choice.adapter, Path(sys.argv[1])
question = next(each for each in task.build_dataset() if each.answer != each.answer[::-1])
replies = [question.answer, question.answer[::-1], "x"]
graded = [asyncio.run(task.compute_reward(reply, question)) for reply in replies]
refusals = []
for name, options in (
    ("nowhere_taskset", {}), ("reverse_taskset", {"cuont": 1}), ("boxed_taskset", {}), ("two_agents", {})
):
    try:
        load_task(f"verifiers:{name}", **options)
    except mint.errors.InvalidRequestError as error:
        refusals.append(str(error))
config = choice.config.changed(steps=1, batch_size=4, group_size=2, run_dir=folder / "run")
with mint.ServiceClient(data_dir=folder / "service") as service:
    result = run_grpo(task, config, service_client=service)
    rows = [json.loads(line) for line in (folder / "run" / "rollouts.jsonl").read_text().splitlines()]
    hidden = load_task("verifiers:hidden_env", count=20, heldout=0.25).adapter
    turns = config.changed(max_turns=4, run_dir=folder / "turns")
    played = run_grpo(hidden, turns, service_client=service)
turn_rows = [json.loads(line) for line in (folder / "turns" / "rollouts.jsonl").read_text().splitlines()]

async def play(replies):
    tasks = [*hidden.build_dataset(), *hidden.build_heldout()]
    env = hidden.make_env(next(task for task in tasks if task.data.number == 4))
    said = [message["content"] for message in await env.initial_observation()]
    for reply in replies:
        step = env.cut_off("length") if reply is None else env.step({"role": "assistant", "content": reply})
        try:
            result = await step
        except ValueError as error:
            return said, str(error)
        said += [message["content"] for message in result.next_messages]
    return said, [result.episode_done, result.reward, dict(result.parts), dict(result.metrics)]

async def abandon():
    env = hidden.make_env(hidden.build_dataset()[0])
    await env.initial_observation()
    during = sys.modules["hidden_env"].HiddenEnv.playing
    await env.close()
    await env.close()
    return during, sys.modules["hidden_env"].HiddenEnv.playing

left = sys.modules["hidden_env"].HiddenEnv.playing
print(json.dumps({
    "abandoned": asyncio.run(abandon()), "left": left,
    "hidden": [asyncio.run(play(replies)) for replies in (["4"], ["7", "4"], ["1", "2", "3"], ["1", None], ["x"])],
    "hidden_sizes": [len(hidden.build_dataset()), len(hidden.build_heldout())],
    "hidden_rollouts": [[row["stop_reason"], row["error"], sorted(row["parts"])] for row in turn_rows],
    "sizes": [len(task.build_dataset()), len(task.build_heldout())],
    "values": [one.value for one in graded], "parts": dict(graded[0].parts), "info": dict(graded[0].info),
    "refusals": refusals, "samples": result.samples, "part_names": sorted(rows[0]["parts"]),
    "errors": [row["error"] for row in rows if row["error"]],
}))
"""

NEEDS_RUNTIME = TASKSETS.replace("trace: vf.Trace) -> float:\n        return float(trace.last", "trace: vf.Trace, runtime: vf.Runtime) -> float:\n        return float(trace.last", 1)  # fmt: skip  # noqa: E501


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_verifiers_tasksets_run_through_our_loop_in_one_turn_and_in_many(tmp_path: Path) -> None:
    """Installs verifiers 0.4.0 (about 570 MB) beside this environment's packages, which it must not change."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    pinned = ["-c", str(ROOT / "constraints" / "cpu.txt")]
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *pinned, "verifiers==0.4.0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ResolutionImpossible" not in installed.stderr, installed.stderr[-3000:]
    if installed.returncode:
        pytest.skip(f"no package registry: {installed.stderr[-300:]}")
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # This environment's own packages (torch, …), found after those of the new one.
    (Path(site) / "zz_mint.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n{tmp_path}\n")
    (tmp_path / "reverse_taskset.py").write_text(TASKSETS)
    (tmp_path / "boxed_taskset.py").write_text(NEEDS_RUNTIME)
    (tmp_path / "hidden_env.py").write_text(ENVIRONMENT)
    (tmp_path / "two_agents.py").write_text(TWO_AGENTS)
    script = tmp_path / "use_them.py"
    script.write_text(USE_THEM)
    ran = subprocess.run([python, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert sum(seen["sizes"]) == 40
    assert seen["values"] == [1.0, 0.25, 0.0]
    assert seen["parts"] == {"exact": 0.75, "letters": 0.25}
    assert seen["info"] == {"metrics": {"length": 3.0}}
    assert "cannot be loaded" in seen["refusals"][0]
    assert "cuont" in seen["refusals"][1]
    assert "scores exact in the agent's runtime" in seen["refusals"][2]
    assert "has 2 agents (judge, player)" in seen["refusals"][3]
    assert (seen["samples"], seen["part_names"], seen["errors"]) == (8, ["exact", "letters"], [])
    opening = ["Digits only.", "Guess my number."]
    assert seen["hidden"] == [
        [opening, [True, 1.0, {"found": 0.5, "speed": 0.5}, {"turns": 1.0}]],
        [[*opening, "It is lower."], [True, 0.75, {"found": 0.5, "speed": 0.25}, {"turns": 2.0}]],
        [
            [*opening, "It is higher.", "It is higher."],
            [True, pytest.approx(1 / 6), {"found": 0.0, "speed": pytest.approx(1 / 6)}, {"turns": 3.0}],
        ],
        [[*opening, "It is higher."], [True, 0.25, {"found": 0.0, "speed": 0.25}, {"turns": 1.0}]],
        [opening, "no digits"],
    ]
    assert sum(seen["hidden_sizes"]) == 20
    assert (seen["abandoned"], seen["left"]) == ([1, 0], 0), "an environment whose episode is over has ended"
    assert len(seen["hidden_rollouts"]) == 8
    for reason, error, parts in seen["hidden_rollouts"]:
        assert error is not None or (reason in ("env", "length", "max_turns") and parts == ["found", "speed"])
