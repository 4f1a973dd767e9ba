"""Settings of a run: refused at the door when they make no sense."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mint.config import read_settings, unknown_variables
from mint.errors import InvalidRequestError
from mint.recipes.distill import DistillConfig
from mint.recipes.dpo import DPOConfig
from mint.recipes.sft import SFTConfig
from mint.rl import RLConfig
from mint.rl.run_config import RunConfig
from mint.rl.seeds import mix_seed
from mint.rl.training.advantages import group_advantages


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss_fn", "reinforce"), ("group_size", 1), ("batch_size", 0), ("max_tokens", 0), ("learning_rate", -1.0),
        ("learning_rate", float("nan")), ("temperature", 0.0), ("kl_penalty_coef", -0.1), ("betas", (0.9, 1.0)),
        ("rank", 0), ("rank", 10_000), ("steps", -1),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        RLConfig(**{field: value})


def test_the_linear_schedule_starts_at_the_learning_rate_and_falls_towards_zero() -> None:
    config = RLConfig(learning_rate=1e-3, steps=4, lr_schedule="linear")
    assert [config.learning_rate_at(step, 4) for step in (1, 2, 3, 4)] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(InvalidRequestError, match=r"RLConfig\.group_szie") as refused:
        RLConfig(group_szie=8)
    assert refused.value.remedy == "Did you mean group_size?"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("num_generations", "group_size"),
        ("beta", "kl_penalty_coef"),  # not betas
        ("epsilon", "clip_low_threshold"),  # not eps
        ("epochs", "epochs_per_batch"),
        ("entropy_coeff", "entropy_coef"),
        ("lr", "learning_rate"),
        ("delta", "dual_clip"),  # not betas
        ("mask_truncated_completions", "truncation"),
        ("eval_steps", "eval_every"),  # not steps
    ],
)
def test_the_names_of_other_trainers_are_refused_with_ours(theirs: str, ours: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{theirs} = 1.*Give .*{ours}"):
        RLConfig(**{theirs: 1})


def test_the_names_of_other_trainers_lead_to_settings_that_exist() -> None:
    for theirs, remedy in RLConfig.names_elsewhere.items():
        assert theirs not in RLConfig.model_fields
        named = re.findall(r"[a-z_]+", re.sub(r"=({.*?}|'[a-z]*')", "", remedy))
        assert set(named) - {"and", "or"} <= RLConfig.model_fields.keys(), remedy


def test_numbers_of_numpy_are_python_numbers_in_a_config() -> None:
    config = RLConfig(steps=np.int64(4), learning_rate=np.geomspace(1e-5, 1e-3, 3)[1], seed=np.array(7))
    assert [type(value) for value in (config.steps, config.learning_rate, config.seed)] == [int, float, int]
    assert config.changed(group_size=np.uint8(8), dynamic_sampling=np.True_).dynamic_sampling is True
    with pytest.raises(InvalidRequestError, match=r"steps = 2\.5: must be a whole number, not float"):
        RLConfig(steps=np.float64(2.5))
    with pytest.raises(InvalidRequestError, match=r"steps"):
        RLConfig(steps=np.array([4]))


def test_two_names_of_one_setting_are_not_mistaken_for_another_setting() -> None:
    with pytest.raises(InvalidRequestError, match=r"groups_per_batch = 8: is another name of batch_size, .*one of the"):
        RLConfig(batch_size=4, groups_per_batch=8)
    with pytest.raises(InvalidRequestError, match=r"group_per_batch.*Did you mean groups_per_batch\?"):
        RLConfig(group_per_batch=8)


def test_more_optimizer_steps_than_groups_are_refused() -> None:
    refusal = r"RLConfig\.optim_steps_per_batch = 9: is above batch_size = 8.*at most 8, or raise epochs_per_batch"
    with pytest.raises(InvalidRequestError, match=refusal):
        RLConfig(batch_size=8, optim_steps_per_batch=9)
    assert RLConfig(batch_size=8, optim_steps_per_batch=8).optim_steps_per_batch == 8


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"kl_reference_every": 5}, "kl_penalty_coef"),
        ({"kl_reference": "base"}, "kl_penalty_coef"),
        ({"staleness": "exactly"}, "max_staleness"),
        ({"overlong_buffer": 4, "truncation": "mask"}, "truncation"),
        ({"truncation_penalty": 0.1}, "truncation"),
        ({"eval_every": 5, "heldout_size": 0}, "heldout_size"),
        ({"heldout_samples": 4, "heldout_size": 0}, "heldout_size"),
        ({"correction_high": 5.0}, "correction"),
        ({"replay_below": 0.5}, "replay_size"),
        ({"max_refill": 1.0}, "dynamic_sampling"),
        ({"curriculum_low": 0.1}, "curriculum"),
        ({"grader_backoff_s": 0.1}, "grader_retries"),
        ({"loss_fn_config": {"tis_cap": 2.0}, "correction": "token_mask"}, "correction"),
        ({"dynamic_sampling": True, "max_refill": 0.0}, "max_refill = 0"),
        ({"dynamic_sampling": True, "max_refill": 0.1, "batch_size": 8}, "max_refill = 0.1"),
    ],
)
def test_a_setting_without_effect_is_named_with_what_it_needs(fields: dict[str, Any], needed: str) -> None:
    (sentence,) = RLConfig(**fields).unused_settings()
    assert all(word in sentence for word in (next(iter(fields)), "has no effect", needed))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kl_reference_every": 5, "kl_penalty_coef_end": 0.1},
        {"staleness": "exactly", "max_staleness": 1},
        {"overlong_buffer": 4, "truncation": "soft", "truncation_penalty": 1.0},
        {"eval_every": 5, "heldout_samples": 4},
        {"correction": "token_mask", "loss_fn_config": {"tis_cap": 2.0}, "optim_steps_per_batch": 2},
        {"correction": "token_mask", "correction_low": 0.1},
        {"dynamic_sampling": True, "max_refill": 0.125, "batch_size": 8},
    ],
)
def test_a_setting_with_an_effect_is_not_named(fields: dict[str, Any]) -> None:
    assert RLConfig(**fields).unused_settings() == []


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"rank": "8"}, r"RLConfig\.rank = 8: .*not str\. Give an integer, at least 1, at most 256"),
        ({"rank": True}, r"RLConfig\.rank = True: .*not bool\. Give an integer"),
        ({"rank": 257}, r"RLConfig\.rank = 257: .*Give an integer, at least 1, at most 256"),
        ({"learning_rate": True}, r"RLConfig\.learning_rate = True: .*Give a number, at least 0"),
        ({"train_mlp": "no"}, r"RLConfig\.train_mlp = no: .*Give True or False"),
        ({"base_model": 7}, r"RLConfig\.base_model = 7: .*Give a text"),
        ({"betas": ("0.9", 0.99)}, r"RLConfig\.betas\[0\] = 0\.9: .*whose values are a number"),
        ({"temperature_end": 0}, r"RLConfig\.temperature_end = 0: .*Give a number, above 0, or None"),
        ({"lr_schedule": "step"}, r"RLConfig\.lr_schedule = step: .*'cosine'\. Choose one of these"),
        ({"stop": ["\n", ""]}, r"RLConfig\.stop = .*: has an empty text.*Leave it out"),
        ({"groups_per_batch": 0}, r"RLConfig\.groups_per_batch = 0: .*Give an integer, at least 1"),
    ],
)
def test_a_wrong_type_or_range_is_refused_with_what_is_allowed(fields: dict[str, Any], refusal: str) -> None:
    with pytest.raises(InvalidRequestError, match=refusal):
        RLConfig(**fields)
    with pytest.raises(InvalidRequestError, match=refusal):
        RLConfig().model_copy(update=fields)


def test_an_integer_may_stand_for_a_float_a_list_for_a_tuple_and_a_text_for_a_path() -> None:
    config = RLConfig(learning_rate=1, betas=[0, 0.9], trackers=["wandb"], run_dir="runs/x", stop=("a",))  # ty: ignore[invalid-argument-type]
    assert (config.learning_rate, config.betas, config.trackers) == (1.0, (0.0, 0.9), ("wandb",))
    assert (config.run_dir, config.stop) == (Path("runs/x"), ["a"])


def test_a_copy_with_changes_is_checked_and_keeps_the_rest() -> None:
    config = RLConfig(steps=7, betas=(0.8, 0.9))
    assert config.model_copy(update={"steps": 3}) == RLConfig(steps=3, betas=(0.8, 0.9))
    assert config.model_copy(update={"groups_per_batch": 3}) == RLConfig(steps=7, betas=(0.8, 0.9), batch_size=3)
    assert config.model_copy() == config
    with pytest.raises(InvalidRequestError, match=r"RLConfig\.stepz = 1: .*Did you mean steps\?"):
        config.model_copy(update={"stepz": 1})
    with pytest.raises(InvalidRequestError, match=r"curriculum_low = 0\.9"):
        config.model_copy(update={"curriculum_low": 0.9})


def test_words_of_a_command_line_are_converted_to_the_types_of_their_fields() -> None:
    words = {"rank": "8", "train_mlp": "no", "betas": ["0.8", 0.9], "trackers": "wandb,trackio", "steps": 1e2}
    config = RLConfig.from_texts(words)
    assert (config.rank, config.train_mlp, config.betas, config.steps) == (8, False, (0.8, 0.9), 100)
    assert config.trackers == ("wandb", "trackio")
    with pytest.raises(InvalidRequestError, match=r"RLConfig\.rank = many: .*Give an integer, at least 1, at most 256"):
        RLConfig.from_texts({"rank": "many"})


def test_mixed_seeds_differ_and_fit_63_bits() -> None:
    seeds = {mix_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix_seed(1, 2) != mix_seed(2, 1)


def test_the_temperature_moves_linearly_to_its_end() -> None:
    config = RLConfig(temperature=1.2, temperature_end=0.8, steps=5)
    assert [config.temperature_at(step) for step in range(1, 6)] == pytest.approx([1.2, 1.1, 1.0, 0.9, 0.8])
    assert RLConfig(temperature=0.7, steps=5).temperature_at(5) == 0.7


def test_warm_up_rises_to_the_learning_rate_and_the_cosine_falls_from_it() -> None:
    config = RLConfig(learning_rate=1e-3, steps=6, lr_schedule="cosine", lr_warmup_steps=2)
    rates = [config.learning_rate_at(step, config.steps) for step in range(1, 7)]
    assert rates[:3] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert rates[2:] == pytest.approx([1e-3 * (1 + np.cos(np.pi * done / 4)) / 2 for done in range(4)])


def test_a_band_upside_down_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="curriculum_low"):
        RLConfig(curriculum_low=0.9, curriculum_high=0.1)


@pytest.mark.parametrize("config", [RLConfig(), SFTConfig(), DPOConfig(), DistillConfig()])
def test_every_config_is_changed_by_name_and_checked(config: RunConfig) -> None:
    assert config.changed(learning_rate=0.5).learning_rate == 0.5
    assert config.changed() == config
    for change in (config.changed, lambda **fields: config.model_copy(update=fields)):
        with pytest.raises(InvalidRequestError, match=r"learning_rat = .*Did you mean learning_rate\?"):
            change(learning_rat=9)
        with pytest.raises(InvalidRequestError, match=r"learning_rate = fast: .*not str"):
            change(learning_rate="fast")


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"loss_fn_config": {"entropy": 0.1}}, r"entropy: importance_sampling has no such setting.*tis_cap"),
        ({"loss_fn": "ppo", "loss_fn_config": {"tis_cap": 2.0}}, r"tis_cap: ppo has no such setting"),
        ({"loss_fn_config": {"temperature": 0.0}}, r"loss_fn_config\.temperature = 0\.0: must be above 0"),
        ({"loss_fn": "cross_entropy"}, r"RLConfig\.loss_fn = cross_entropy: is for demonstrations"),
        ({"advantage": "gae"}, r"RLConfig\.advantage = gae: .*'center', 'rloo'"),
        ({"advantage": "reinforce++", "credit": "turn"}, r"advantage = reinforce\+\+: cannot .*credit = turn"),
        ({"truncation": "soft"}, r"overlong_buffer = 0: must be from 1 to the limit of 16 tokens.*Try 4"),
        ({"correction_low": 2.0}, r"correction_low = 2\.0: is not below correction_high = 2"),
        ({"logprobs_mode": "processed", "kl_penalty_coef": 0.1}, r"logprobs_mode = processed: .*a KL penalty"),
        ({"logprobs_mode": "processed", "correction": "sequence_mask"}, r"logprobs_mode = processed: .*correction"),
        ({"kl_reference": "ema"}, r"RLConfig\.kl_reference = ema: is not a checkpoint.*\"base\" for the base model"),
        ({"truncation": "drop"}, r"RLConfig\.truncation = drop: .*'keep', 'mask'"),
        ({"init_optimizer": True}, r"RLConfig\.init_optimizer = True: needs init_from"),
        ({"curriculum": True, "max_staleness": 1}, r"RLConfig\.max_staleness = 1: cannot be combined"),
    ],
)
def test_what_the_objective_cannot_be_is_refused_when_the_config_is_made(fields: dict[str, Any], refusal: str) -> None:
    with pytest.raises(InvalidRequestError, match=refusal):
        RLConfig(**fields)
    with pytest.raises(InvalidRequestError, match=refusal):
        RLConfig().changed(**fields)


def test_an_unknown_estimator_of_the_advantage_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"advantage = gae: .*center, rloo"):
        group_advantages([0.0, 1.0], "gae")  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize(
    ("variable", "remedy"),
    [
        ("MINT_KV_CACHE_BYTES", "Did you mean MINT_KV_CACHE_MIB?"),
        ("MINT_THREAD", "Did you mean MINT_THREADS?"),
        ("MINT_RL_LEARNING_RATE", "The variables of this kind are MINT_RL_BATCH, MINT_RL_GROUP, MINT_RL_LR"),
        ("MINT_SERVE_WORKERS", "The variables of this kind are MINT_SERVE_API_KEYS"),
    ],
)
def test_a_misspelt_variable_is_refused_wherever_the_environment_is_read(
    variable: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    for read in (read_settings, RLConfig.from_env, unknown_variables):
        with pytest.raises(InvalidRequestError, match=variable) as refused:
            read()
        assert (refused.value.remedy or "").startswith(remedy)


def test_a_variable_of_a_script_is_not_taken_for_a_misspelt_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_RESUME_PATH", "x")
    monkeypatch.setenv("MINT_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("MINT_SERVE_LOG_LEVEL", "info")
    assert read_settings().base_url == "http://127.0.0.1:1"
    assert "MINT_RESUME_PATH" in unknown_variables()
    assert not {"MINT_BASE_URL", "MINT_SERVE_LOG_LEVEL"} & {*unknown_variables()}


def test_all_fields_that_are_wrong_are_named_at_once() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        RLConfig().changed(stpes=2, learning_rate="fast", advantage="reinforc++")
    message = str(refused.value)
    assert all(name in message for name in ("stpes", "learning_rate", "advantage"))


def test_a_value_of_none_of_several_kinds_is_refused_by_its_own_name() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        RLConfig(chat_options={"tools": []})
    assert refused.value.field == "RLConfig.chat_options.tools"
    assert refused.value.remedy == "Give a dict whose values are True or False or an integer or a number or a text"
