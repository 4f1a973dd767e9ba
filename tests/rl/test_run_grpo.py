"""The shared loop on the bundled model: it learns, it repeats, it resumes, and nothing that fails is silent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from mint.client.service_client import ServiceClient
from mint.errors import InvalidRequestError, NotFoundError, UnknownBaseModelError
from mint.models.registry import BUNDLED
from mint.recipes.chat import ChatAdapter
from mint.recipes.math import DEMO, MathAdapter
from mint.recipes.tools import ToolsAdapter
from mint.rl import MessageEnv, MessageEnvAdapter, MessageStepResult, Reward, RLAdapter, RLConfig, RunResult, run_grpo
from mint.runs.process import PROCESS
from mint.types import LossName

pytestmark = pytest.mark.learns

SMALL = DEMO.changed(batch_size=4, group_size=4, steps=3, heldout_size=16)


class Constant(RLAdapter):
    """Every completion earns the same."""

    def build_dataset(self) -> Sequence[str]:
        return ["1 + 1", "2 + 2", "3 + 3"]

    def make_prompt(self, item: str, tokenizer: Any) -> list[int]:
        return tokenizer.encode(f"Q: What is {item}?\nA:")

    def compute_reward(self, response: str, item: str) -> float:
        return 0.0


class ManyDigits(Constant):
    """More digits, more reward: any policy can climb it, and it always differs within a group."""

    def compute_reward(self, response: str, item: str) -> float:
        return sum(character.isdigit() for character in response) / 16


def rows(result: RunResult, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (result.run_dir / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def assert_same_bits(one: RunResult, other: RunResult) -> None:
    assert one.state_digest == other.state_digest is not None
    assert rows(one, "metrics.jsonl") == rows(other, "metrics.jsonl")
    assert rows(one, "rollouts.jsonl") == rows(other, "rollouts.jsonl")
    assert one.heldout_after == other.heldout_after


@pytest.mark.slow
def test_the_policy_learns_arithmetic_that_it_was_never_trained_on() -> None:
    config = DEMO.changed(steps=30, heldout_size=128)
    result = run_grpo(MathAdapter(seed=0), config)
    before, after = result.heldout_before[1.0], result.heldout_after[1.0]
    assert after.low > before.high, (before, after)
    assert result.heldout_after[0.0].mean > result.heldout_before[0.0].mean
    assert result.max_abs_logprob_diff <= 1e-5


def test_the_same_seed_gives_the_same_run_bit_for_bit_and_another_seed_another() -> None:
    one, again = (run_grpo(MathAdapter(seed=1), SMALL.changed(seed=1)) for _ in range(2))
    assert_same_bits(one, again)
    other = run_grpo(MathAdapter(seed=1), SMALL.changed(seed=2))
    assert other.state_digest != one.state_digest


def test_runs_in_the_home_folder_are_their_owner_s_alone_from_the_first_on(caplog: pytest.LogCaptureFixture) -> None:
    config = RLConfig(base_model="mint/tiny", steps=0, heldout_size=0, print_progress=False)
    with umask(0o022):
        runs = [run_grpo(MathAdapter(seed=0, train_size=8), config).run_dir for _ in range(2)]
    assert {path.stat().st_mode & 0o777 for run in runs for path in (run, run.parent)} == {0o700}
    assert "others could read" not in caplog.text


def test_a_run_that_is_resumed_where_there_is_none_says_that_it_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RLConfig(base_model="mint/tiny", steps=0, heldout_size=0, print_progress=False, run_dir=tmp_path / "run")
    run_grpo(MathAdapter(seed=0, train_size=8), config, resume=True)
    assert "run holds no run yet: the run starts at step 1" in caplog.text


def test_a_run_is_not_resumed_in_another_folder_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    meant = tmp_path / "home" / "runs" / "first"
    config = RLConfig(base_model="mint/tiny", steps=0, heldout_size=0, print_progress=False, run_dir=meant)
    adapter = MathAdapter(seed=0, train_size=8)
    run_grpo(adapter, config)
    with pytest.raises(InvalidRequestError, match=rf"run_dir = first: holds no run to resume.* is {meant}"):
        run_grpo(adapter, config.changed(run_dir=Path("first")), resume=True)
    assert not (tmp_path / "first").exists()


def test_a_run_is_not_resumed_while_another_process_runs_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = RLConfig(base_model="mint/tiny", steps=0, heldout_size=0, print_progress=False, run_dir=folder)
    adapter = MathAdapter(seed=0, train_size=8)
    run_grpo(adapter, config)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        content = json.loads((folder / PROCESS).read_text())
        running = {**content, "pid": other.pid, "began_at": time.time(), "ended_at": None, "outcome": None}
        (folder / PROCESS).write_text(json.dumps(running))
        with pytest.raises(InvalidRequestError, match=rf"{folder}: holds a run that process {other.pid} runs now"):
            run_grpo(adapter, config, resume=True)
        assert json.loads((folder / PROCESS).read_text()) == running
        other.kill()
    assert run_grpo(adapter, config, resume=True).steps == 0, "it was killed"


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """The rights that new files do not get."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _halved(base: Path) -> None:
    text = (base / "tokenizer.json").read_text()
    (base / "tokenizer.json").write_text(text[: len(text) // 2])


def _with_one_token_more(base: Path) -> None:
    content = json.loads((base / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 4096, "content": "<new>", "special": False})
    (base / "tokenizer.json").write_text(json.dumps(content))


def _without_template(base: Path) -> None:
    content = json.loads((base / "tokenizer_config.json").read_text())
    content.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(content))
    (base / "chat_template.jinja").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("change", "adapter", "named"),
    [
        (lambda base: (base / "tokenizer.json").write_text("{}"), MathAdapter, "tokenizer that cannot be loaded"),
        (_halved, MathAdapter, r"tokenizer that cannot be loaded .*tokenizer\.json"),
        (
            _with_one_token_more,
            MathAdapter,
            r"the token '<new>' with the id 4096, and config\.json gives .* \d+ tokens",
        ),
        (_without_template, ChatAdapter, r"has no chat template, .*Take a chat model, put a chat_template\.jinja into"),
        (_without_template, ToolsAdapter, r"task = ToolsAdapter: .* has no chat template\. Choose a chat model"),
    ],
)
def test_a_tokenizer_that_the_run_cannot_use_leaves_neither_folder_nor_training_run(
    tmp_path: Path, change: Callable[[Path], object], adapter: Callable[[], RLAdapter | MessageEnvAdapter], named: str
) -> None:
    base = tmp_path / "base"
    shutil.copytree(BUNDLED["mint/tiny"], base)
    change(base)
    config = SMALL.changed(base_model=str(base), run_dir=tmp_path / "run")
    with ServiceClient() as service:
        with pytest.raises(InvalidRequestError, match=named):
            run_grpo(adapter(), config, service_client=service)
        assert service.create_rest_client().list_training_runs().result().training_runs == []
    assert not (tmp_path / "run").exists()


def test_a_run_whose_base_model_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    config = SMALL.changed(base_model="no/such", run_dir=tmp_path / "run")
    with pytest.raises(UnknownBaseModelError, match="no/such"):
        run_grpo(MathAdapter(seed=0), config)
    assert not (tmp_path / "run").exists()


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from mint.recipes.math import MathAdapter
from mint.rl import RLConfig, run_grpo
config = RLConfig(**eval(sys.argv[1])).model_copy(update={"run_dir": Path(sys.argv[2])})
def on_progress(event, fields):
    if event == "step" and fields["step"] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
run_grpo(MathAdapter(seed=3), config, on_progress=on_progress)
"""


def test_a_run_that_was_killed_resumes_to_the_same_bits(tmp_path: Path) -> None:
    config = SMALL.changed(seed=3, steps=5, save_every=2)
    clean = run_grpo(MathAdapter(seed=3), config.changed(run_dir=tmp_path / "clean"))
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED_RUN, repr(config.model_dump(exclude={"run_dir"})), str(folder)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    resumed = run_grpo(MathAdapter(seed=3), config.changed(run_dir=folder), resume=True)
    assert_same_bits(clean, resumed)
    assert (resumed.samples, resumed.tokens) == (clean.samples, clean.tokens)
    over = run_grpo(MathAdapter(seed=3), config.changed(run_dir=folder), resume=True)
    assert over.state_digest == clean.state_digest, "killed between its last step and its end"


def test_a_run_folder_of_an_older_mint_resumes_to_the_same_bits(tmp_path: Path) -> None:
    config = SMALL.changed(steps=1, heldout_size=2, run_dir=tmp_path)
    result = run_grpo(MathAdapter(seed=0), config)
    point = json.loads((tmp_path / "state.json").read_text())
    point["state"]["readings"] = point["state"].pop("heldout")
    (tmp_path / "state.json").write_text(json.dumps(point))
    assert_same_bits(result, run_grpo(MathAdapter(seed=0), config, resume=True))


def test_groups_without_a_signal_are_counted_no_step_is_taken_and_the_run_says_so() -> None:
    config = RLConfig(base_model="mint/tiny", steps=6, batch_size=3, max_tokens=4, heldout_size=0)
    result = run_grpo(Constant(), config)
    metrics = rows(result, "metrics.jsonl")
    assert [row["groups/all_bad"] for row in metrics] == [3.0] * 6
    assert [row["datums"] for row in metrics] == [0.0] * 6
    assert result.state_digest is None
    assert "no_learning_signal_all_wrong" in {finding.code for finding in result.findings}
    assert rows(result, "findings.jsonl")


def test_an_entropy_bonus_acts_on_groups_without_a_signal_too() -> None:
    config = RLConfig(base_model="mint/tiny", steps=6, batch_size=3, max_tokens=4, heldout_size=0, learning_rate=3e-3)
    result = run_grpo(Constant(), config.changed(loss_fn_config={"entropy_coef": 0.1}))
    metrics = rows(result, "metrics.jsonl")
    assert [row["datums"] for row in metrics] == [12.0] * 6
    assert metrics[-1]["train/entropy"] > 1.2 * metrics[0]["train/entropy"]


def test_a_failing_grader_costs_its_sample_and_is_shown() -> None:
    class FailsOnSome(ManyDigits):
        def compute_reward(self, response: str, item: str) -> float:
            if item == "2 + 2":
                raise ValueError("the judge is away")
            return super().compute_reward(response, item)

    config = RLConfig(base_model="mint/tiny", steps=1, batch_size=3, max_tokens=4, heldout_size=0)
    result = run_grpo(FailsOnSome(), config)
    (metrics,) = rows(result, "metrics.jsonl")
    assert metrics["rollouts/ungraded"] == 4.0
    assert metrics["groups/failed"] == 1.0
    errors = {row["error"] for row in rows(result, "rollouts.jsonl") if row["reward"] is None}
    assert errors == {"ValueError: the judge is away"}
    assert "grader_failures" in {finding.code for finding in result.findings}


def test_a_prompt_that_cannot_be_sampled_costs_its_group() -> None:
    class OneTooLong(ManyDigits):
        def make_prompt(self, item: str, tokenizer: Any) -> list[int]:
            prompt = super().make_prompt(item, tokenizer)
            return prompt * 2000 if item == "2 + 2" else prompt

    result = run_grpo(OneTooLong(), RLConfig(base_model="mint/tiny", steps=1, batch_size=3, heldout_size=0))
    failed = [row for row in rows(result, "rollouts.jsonl") if "tokens" not in row]
    assert len(failed) == 1
    assert "context" in failed[0]["error"]


def test_an_empty_dataset_is_refused() -> None:
    class Empty(Constant):
        def build_dataset(self) -> Sequence[str]:
            return []

    with pytest.raises(InvalidRequestError, match="build_dataset"):
        run_grpo(Empty(), RLConfig(base_model="mint/tiny"))


def test_the_kl_penalty_holds_the_policy_near_the_base_model() -> None:
    def drift(coef: float) -> float:
        config = RLConfig(
            base_model="mint/tiny", steps=6, batch_size=4, group_size=8, max_tokens=6, temperature=1.0,
            learning_rate=2e-3, kl_penalty_coef=coef, heldout_size=0,
        )  # fmt: skip
        result = run_grpo(ManyDigits(), config)
        return rows(result, "metrics.jsonl")[-1]["kl/policy_reference_k3"]

    assert drift(2.0) < 0.5 * drift(1e-6)


@pytest.mark.parametrize("loss_fn", [name for name in get_args(LossName) if name != "cross_entropy"])
def test_each_policy_loss_climbs_a_reward(loss_fn: str) -> None:
    config = RLConfig(
        base_model="mint/tiny", loss_fn=loss_fn, steps=8, batch_size=4, group_size=8, max_tokens=6, temperature=1.0,
        learning_rate=3e-3, heldout_size=0,
    )  # fmt: skip
    rewards = [row["reward/mean"] for row in rows(run_grpo(ManyDigits(), config), "metrics.jsonl")]
    assert sum(rewards[-2:]) > sum(rewards[:2])


def small(**fields: Any) -> RLConfig:
    return RLConfig(
        **{
            "base_model": "mint/tiny", "steps": 3, "batch_size": 4, "group_size": 4, "max_tokens": 6,
            "temperature": 1.0, "learning_rate": 2e-3, "heldout_size": 0, **fields,
        }
    )  # fmt: skip


def test_several_optimizer_steps_per_batch_go_off_policy_and_say_by_how_much() -> None:
    metrics = rows(run_grpo(ManyDigits(), small(optim_steps_per_batch=2)), "metrics.jsonl")
    assert [row["optim/steps"] for row in metrics] == [2.0, 2.0, 2.0]
    assert all(row["train/ratio_max"] > 1.0 for row in metrics)
    assert all(row["mismatch/max_abs_logprob_diff"] == 0 for row in metrics), "the first pass is on-policy"


def test_dynamic_sampling_replaces_groups_without_a_signal_up_to_its_limit() -> None:
    class HalfConstant(ManyDigits):
        def build_dataset(self) -> Sequence[str]:
            return [f"{i} + {i}" for i in range(16)]

        def compute_reward(self, response: str, item: str) -> float:
            return 0.0 if int(item.split()[0]) % 2 else super().compute_reward(response, item)

    plain = rows(run_grpo(HalfConstant(), small(steps=2)), "metrics.jsonl")
    refilled = rows(run_grpo(HalfConstant(), small(steps=2, dynamic_sampling=True, max_refill=9.0)), "metrics.jsonl")
    assert sum(row["datums"] for row in refilled) > sum(row["datums"] for row in plain)
    assert all(row["datums"] == 16 for row in refilled)
    constant = rows(run_grpo(Constant(), small(steps=1, dynamic_sampling=True, max_refill=2.0)), "metrics.jsonl")
    assert (constant[0]["groups/total"], constant[0]["groups/refilled"]) == (12.0, 8.0)


@pytest.mark.parametrize("normalization", ["constant", "token", "sequence"])
def test_each_normalization_climbs_a_reward(normalization: str) -> None:
    rewards = [
        row["reward/mean"]
        for row in rows(run_grpo(ManyDigits(), small(steps=8, loss_normalization=normalization)), "metrics.jsonl")
    ]
    assert sum(rewards[-2:]) > sum(rewards[:2])


def test_held_out_evaluations_follow_the_schedule_and_the_best_weights_are_kept() -> None:
    config = SMALL.changed(steps=4, eval_every=2, heldout_samples=4)
    result = run_grpo(MathAdapter(seed=0), config)
    evaluations = [(row["when"], row["step"], row["temperature"]) for row in rows(result, "evaluations.jsonl")]
    assert evaluations == [(*place, t) for place in (("before", 0), ("during", 2), ("after", 4)) for t in (0.0, 1.0)]
    assert result.best_checkpoint is not None
    assert result.heldout_after[1.0].pass_at.keys() == {"1", "2", "4"}
    assert result.heldout_after[1.0].pass_at["4"] >= result.heldout_after[1.0].pass_at["1"]


def test_a_run_starts_from_the_checkpoint_of_another() -> None:
    first = run_grpo(ManyDigits(), small(steps=6))
    second = run_grpo(ManyDigits(), small(steps=1, init_from=first.checkpoint, seed=1))
    fresh = run_grpo(ManyDigits(), small(steps=1, seed=1))
    mean = {name: rows(run, "metrics.jsonl")[0]["reward/mean"] for name, run in (("on", second), ("fresh", fresh))}
    assert mean["on"] > mean["fresh"]


def test_a_run_goes_on_with_a_clipped_loss_and_the_same_optimizer() -> None:
    first = run_grpo(ManyDigits(), small(steps=3))
    changed = {"steps": 1, "init_from": first.checkpoint, "loss_fn": "ppo", "learning_rate": 1e-4}
    kept = run_grpo(ManyDigits(), small(**changed, init_optimizer=True))
    assert rows(kept, "metrics.jsonl")[0]["optim/step"] == 4.0
    assert rows(run_grpo(ManyDigits(), small(**changed)), "metrics.jsonl")[0]["optim/step"] == 1.0
    with pytest.raises(InvalidRequestError, match="init_optimizer"):
        run_grpo(ManyDigits(), small(init_optimizer=True))


def test_training_samples_that_are_held_out_are_left_out_and_the_run_says_so() -> None:
    class Leaks(ManyDigits):
        def build_heldout(self) -> Sequence[str]:
            return ["2 + 2"]

    result = run_grpo(Leaks(), small(steps=2, heldout_size=8))
    assert {row["sample"] for row in rows(result, "rollouts.jsonl")} == {"1 + 1", "3 + 3"}
    assert "heldout_overlap" in {finding.code for finding in result.findings}


def test_a_dataset_may_be_a_generator() -> None:
    class Drawn(ManyDigits):
        def build_dataset(self) -> Any:
            yield from super().build_dataset()

    class ByPlace(ManyDigits):
        """A dataset as those of torch: with a length and places."""

        def build_dataset(self) -> Any:
            return type("Places", (), {"__getitem__": lambda self, place: ["1 + 1", "2 + 2"][place]})()

    assert run_grpo(Drawn(), small(steps=1)).steps == run_grpo(ByPlace(), small(steps=1)).steps == 1


@pytest.mark.parametrize("built", [None, 3, "data.jsonl"])
@pytest.mark.parametrize("method", ["build_dataset", "build_heldout"])
def test_a_dataset_that_is_no_list_is_refused_by_the_name_of_its_method(built: Any, method: str) -> None:
    task = type("Odd", (ManyDigits,), {method: lambda self: built})
    with pytest.raises(InvalidRequestError, match=rf"Odd\.{method}\(\) = {built}: is .*Return a list of items"):
        run_grpo(task(), small(steps=1))


def test_a_reference_that_is_not_there_is_refused_by_the_name_of_the_setting() -> None:
    missing = "mint://nobody:train:0/sampler_weights/none"
    with pytest.raises(NotFoundError, match=rf"RLConfig\.kl_reference = {missing}: is not here"):
        run_grpo(ManyDigits(), small(steps=1, kl_reference=missing, kl_penalty_coef=0.1))


@pytest.mark.parametrize(
    ("made", "remedy"),
    [
        ([{"role": "user", "content": "2 + 2"}], "returned messages; return token ids: tokenizer.apply_chat_template"),
        ({"input_ids": [1, 2]}, "returned a dict; return its token ids"),
        ("2 + 2", "returned text; return token ids"),
    ],
)
def test_a_prompt_that_is_no_token_ids_is_refused_with_how_to_make_them(made: Any, remedy: str) -> None:
    class Wrong(ManyDigits):
        def make_prompt(self, item: str, tokenizer: Any) -> Any:
            return made

    with pytest.raises(InvalidRequestError, match=rf"Wrong\.make_prompt\(\) {remedy}"):
        run_grpo(Wrong(), small(steps=1))


def test_a_warm_up_longer_than_the_run_is_named() -> None:
    result = run_grpo(ManyDigits(), small(steps=1, lr_warmup_steps=5))
    (finding,) = [finding for finding in result.findings if finding.code == "unused_settings"]
    assert "is never reached, because lr_warmup_steps = 5 and the run has 1 step" in finding.evidence
    assert not [one for one in run_grpo(ManyDigits(), small(steps=1)).findings if one.code == "unused_settings"]


class OneReply(MessageEnv):
    def initial_observation(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": "2 + 2"}]

    def step(self, message: dict[str, Any]) -> MessageStepResult:
        return MessageStepResult(float("4" in message["content"]))


class Replies(MessageEnvAdapter):
    def build_dataset(self) -> list[str]:
        return ["2 + 2"]

    def make_env(self, item: str) -> MessageEnv:
        return OneReply()


def test_turns_that_are_longer_than_their_episode_may_be_are_named() -> None:
    result = run_grpo(Replies(), small(steps=1, max_tokens=6, max_episode_tokens=2))
    (finding,) = [finding for finding in result.findings if finding.code == "unused_settings"]
    assert "max_tokens = 6 is never reached, because max_episode_tokens = 2" in finding.evidence
    equal = run_grpo(Replies(), small(steps=1, max_tokens=6, max_episode_tokens=6))
    assert "unused_settings" not in {finding.code for finding in equal.findings}


def test_settings_without_effect_are_one_finding_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    run = small(steps=1, kl_reference_every=2, max_turns=3, print_progress=True)
    result = run_grpo(ManyDigits(), run)
    (finding,) = [finding for finding in result.findings if finding.code == "unused_settings"]
    assert "kl_reference_every = 2 has no effect without kl_penalty_coef above 0" in finding.evidence
    assert "max_turns = 3 has no effect without episodes" in finding.evidence
    assert "unused_settings" in capsys.readouterr().err
    continued = small(steps=1, init_from=result.checkpoint)
    assert "unused_settings" not in {finding.code for finding in run_grpo(ManyDigits(), continued).findings}
    (other,) = rows(run_grpo(ManyDigits(), continued.changed(rank=32)), "findings.jsonl")[:1]
    assert "rank = 32 has no effect beside init_from, whose checkpoint has" in other["evidence"]


def test_every_rollout_is_logged_with_prompt_reward_by_part_length_and_advantage() -> None:
    class Parts(ManyDigits):
        def compute_reward(self, response: str, item: str) -> Any:
            digits = super().compute_reward(response, item)
            return Reward(digits - 0.1, {"digits": digits, "toll": -0.1})

    result = run_grpo(Parts(), small(steps=1))
    logged = rows(result, "rollouts.jsonl")
    assert len(logged) == 16
    for row in logged:
        assert row["prompt"].startswith("Q: What is")
        assert row["parts"]["toll"] == -0.1
        assert len(row["tokens"]) == len(row["logprobs"])
    used = [row for row in logged if row["used"]]
    assert sum(row["advantage"] for row in used) == pytest.approx(0.0, abs=1e-9)
    assert rows(result, "metrics.jsonl")[0]["reward/part/toll"] == pytest.approx(-0.1)


def test_rollouts_that_are_trained_on_carry_the_entropy_at_each_of_their_tokens() -> None:
    result = run_grpo(ManyDigits(), small(steps=1, optim_steps_per_batch=2))
    used = [row for row in rows(result, "rollouts.jsonl") if row["used"]]
    assert used and all(len(row["entropies"]) == len(row["tokens"]) for row in used)
    one_pass = run_grpo(ManyDigits(), small(steps=1))
    used = [row for row in rows(one_pass, "rollouts.jsonl") if row["used"]]
    mean = np.mean([entropy for row in used for entropy in row["entropies"]])
    assert mean == pytest.approx(rows(one_pass, "metrics.jsonl")[0]["train/entropy"], abs=1e-4)
    surprise = -np.mean([logprob for row in used for logprob in row["logprobs"]])
    assert mean == pytest.approx(surprise, rel=0.5)  # its expectation, where the tokens were drawn at temperature 1


def test_a_run_without_the_logprobs_of_prompts_measures_the_same() -> None:
    settings: list[dict[str, float] | None] = [None, {"trained_only": 0.0}]
    lean, full = (run_grpo(ManyDigits(), small(steps=1, loss_fn_config=each)) for each in settings)
    (lean_row,), (full_row,) = rows(lean, "metrics.jsonl"), rows(full, "metrics.jsonl")
    assert lean_row.keys() == full_row.keys()
    differ = {key for key, value in lean_row.items() if value != full_row[key]}
    assert differ <= {"optim/grad_norm", "optim/update_norm", "optim/weight_norm"}, "sums over other numbers of rows"
    for key in differ:
        assert lean_row[key] == pytest.approx(full_row[key], rel=1e-5)
    assert rows(lean, "rollouts.jsonl") == rows(full, "rollouts.jsonl")


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_staleness"):
        run_grpo(ManyDigits(), small(curriculum=True, max_staleness=1))


@pytest.mark.parametrize("on_collapse", [pytest.param("warn", marks=pytest.mark.slow), "stop", "rollback"])
def test_a_collapse_ends_the_run_or_returns_to_the_best_weights_as_asked(on_collapse: str) -> None:
    config = SMALL.changed(batch_size=8, group_size=8, steps=12, heldout_size=64, learning_rate=0.1,
            lr_schedule="constant", eval_every=1, on_collapse=on_collapse,)  # fmt: skip
    result = run_grpo(MathAdapter(seed=0), config)
    collapses = {finding.code for finding in result.findings if finding.severity == "error"}
    assert collapses & {"learning_rate_too_high", "reward_collapse"}
    assert (result.stopped_by in collapses) == (on_collapse != "warn")
    assert (result.steps < 12) == (on_collapse != "warn")
    ended = json.loads((result.run_dir / "process.json").read_text())
    assert (ended["outcome"], ended["error"]) == (
        "finished" if result.stopped_by is None else "stopped",
        result.stopped_by,
    )
    if on_collapse == "rollback":
        assert result.checkpoint == result.best_checkpoint
        assert result.heldout_after[0.0].mean >= result.heldout_before[0.0].mean


def test_the_kl_reference_is_the_policy_at_the_start_unless_another_is_named() -> None:
    first = run_grpo(ManyDigits(), small(steps=6))
    from_there = small(steps=2, init_from=first.checkpoint, kl_penalty_coef=0.1, seed=1)

    def drift(config: RLConfig) -> list[float]:
        return [row["kl/policy_reference_k3"] for row in rows(run_grpo(ManyDigits(), config), "metrics.jsonl")]

    start = drift(from_there)
    assert start[0] == pytest.approx(0.0, abs=1e-6)
    assert start[1] > 0
    assert drift(from_there.changed(kl_reference=first.sampler_checkpoint)) == start
    assert drift(from_there.changed(kl_reference=first.checkpoint)) == start
    assert drift(from_there.changed(kl_reference="base"))[0] > 0.01


def test_a_penalized_run_that_goes_on_in_another_working_directory_keeps_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        shutil.copytree(BUNDLED["mint/tiny"], tmp_path / name / "base")
    weights = tmp_path / "there" / "base" / "model.safetensors"
    save_file({name: -tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    config = small(steps=3, base_model="base", kl_penalty_coef=0.1, save_every=1)

    def stop_after_two(event: str, fields: dict[str, Any]) -> None:
        if event == "step" and fields["step"] == 2:
            raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path / "here")
    clean = run_grpo(ManyDigits(), config.changed(run_dir=tmp_path / "clean"))
    again = config.changed(run_dir=tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        run_grpo(ManyDigits(), again, on_progress=stop_after_two)
    monkeypatch.chdir(tmp_path / "there")
    assert_same_bits(clean, run_grpo(ManyDigits(), again, resume=True))


def test_a_penalized_run_from_a_checkpoint_resumes_to_the_same_bits(tmp_path: Path) -> None:
    first = run_grpo(ManyDigits(), small(steps=3))
    config = small(steps=4, init_from=first.checkpoint, kl_penalty_coef=0.1, save_every=2)
    clean = run_grpo(ManyDigits(), config.changed(run_dir=tmp_path / "clean"))

    def stop_after_three(event: str, fields: dict[str, Any]) -> None:
        if event == "step" and fields["step"] == 3:
            raise KeyboardInterrupt

    again = config.changed(run_dir=tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        run_grpo(ManyDigits(), again, on_progress=stop_after_three)
    assert_same_bits(clean, run_grpo(ManyDigits(), again, resume=True))


def test_a_run_with_a_curriculum_and_refills_resumes_to_the_same_bits(tmp_path: Path) -> None:
    config = SMALL.changed(steps=4, save_every=2, curriculum=True, dynamic_sampling=True, heldout_size=0)
    clean = run_grpo(MathAdapter(seed=0), config.changed(run_dir=tmp_path / "clean"))

    def stop_after_three(event: str, fields: dict[str, Any]) -> None:
        if event == "step" and fields["step"] == 3:
            raise KeyboardInterrupt

    again = config.changed(run_dir=tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        run_grpo(MathAdapter(seed=0), again, on_progress=stop_after_three)
    resumed = run_grpo(MathAdapter(seed=0), again, resume=True)
    assert resumed.state_digest == clean.state_digest
    assert rows(resumed, "rollouts.jsonl") == rows(clean, "rollouts.jsonl")
    assert rows(resumed, "metrics.jsonl") == rows(clean, "metrics.jsonl")
