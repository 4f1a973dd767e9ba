"""Episodes with tools through chat templates as their publishers wrote them, from packages that carry them.

llama.cpp's sources hold many (in the source distribution of llama-cpp-python), TRL's wheel others.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tool_templates import format_of, is_extended, play, replies, tokenizer_of

from benchmarks.compare.environments import LLAMA_REQUIREMENTS, run
from mint.types.tool_call_formats import ToolCallFormat

pytestmark = pytest.mark.slow

TRL = "trl==1.16.0"
SPECIAL = re.compile(r"<[|｜][^\s<>'\"{}]+[|｜]>|\[/?[A-Z_]{3,}\]|</s>|<end_of_turn>|<start_of_turn>")
QWEN_THOUGHT, GLM_THOUGHT, HARMONY_THOUGHT = (
    "hm\n</think>\n\n",
    "\n<think>hm</think>\n",
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
)
EOT, IM_END, DEEPSEEK_END, EOS = "<|eot_id|>", "<|im_end|>", "<｜end▁of▁sentence｜>", "</s>"

Case = tuple[ToolCallFormat, str, str, bool]
"""The format, the end of a reply, the reasoning before a call, and whether what was sampled stays as it was."""

LLAMA_CPP: dict[str, Case] = {
    "meta-llama-Llama-3.1-8B-Instruct": ("llama", EOT, "", True),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama", EOT, "", True),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama", EOT, "", True),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", EOS, "", True),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral_named", EOS, "", True),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral_named", EOS, "", True),
    "unsloth-mistral-Devstral-Small-2507": ("mistral_named", EOS, "", True),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", IM_END, "", True),
    "Qwen-Qwen3-0.6B": ("hermes", IM_END, "<think>\nhm\n</think>\n\n", True),
    "Qwen3-Coder": ("qwen_coder", IM_END, "", True),
    "Qwen3.5-4B": ("qwen_coder", IM_END, QWEN_THOUGHT, True),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", IM_END, "", True),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", IM_END, "", True),
    "HuggingFaceTB-SmolLM3-3B": ("hermes", IM_END, "", True),
    "openai-gpt-oss-120b": ("harmony", "<|return|>", HARMONY_THOUGHT, True),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "<|end_of_text|>", "", True),
    "ibm-granite-granite-4.0": ("hermes", "<|end_of_text|>", "", True),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", DEEPSEEK_END, "", True),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", DEEPSEEK_END, "", False),
    "GLM-4.6": ("glm", "<|observation|>", GLM_THOUGHT, True),
    "moonshotai-Kimi-K2": ("kimi", IM_END, "", True),
    "google-gemma-2-2b-it": ("hermes", "<end_of_turn>", "", True),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("command", "<|END_OF_TURN_TOKEN|>", "", True),
}
OF_TRL: dict[str, Case] = {
    "gemma3": ("hermes", "<end_of_turn>", "", True),
    "deepseekv3": ("deepseek_v3", DEEPSEEK_END, "", False),
    "glm4moe": ("glm", "<|observation|>", GLM_THOUGHT, True),
    "gptoss": ("harmony", "<|return|>", HARMONY_THOUGHT, True),
    "llama3_1": ("llama", EOT, "", True),
    "qwen3": ("hermes", IM_END, "<think>\nhm\n</think>\n\n", True),
    "qwen3_5_think": ("qwen_coder", IM_END, QWEN_THOUGHT, True),
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name → text of the templates in both packages."""
    folder = tmp_path_factory.mktemp("templates")
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "-d", str(folder)]
    run([*pip, "--no-binary", "llama-cpp-python", LLAMA_REQUIREMENTS[0]])
    run([*pip, TRL])
    found: dict[str, str] = {}
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member) if "/models/templates/" in member.name and member.isfile() else None
            if file is not None:
                found[Path(member.name).stem] = file.read().decode()
    with zipfile.ZipFile(next(folder.glob("trl*.whl"))) as wheel:
        found |= {f"trl/{Path(name).stem}": wheel.read(name).decode() for name in wheel.namelist() if ".jinja" in name}
    return found


@pytest.mark.parametrize("name", [*LLAMA_CPP, *(f"trl/{name}" for name in OF_TRL)])
def test_an_episode_with_tools_works_with_a_published_template(name: str, templates: dict[str, str]) -> None:
    written_as, end, reasoning, kept = {**LLAMA_CPP, **{f"trl/{one}": case for one, case in OF_TRL.items()}}[name]
    template = templates[name]
    one = tokenizer_of(template, SPECIAL.findall(template), end=end)
    assert format_of(one) == written_as
    call_end = "<|call|>" if written_as == "harmony" else ""
    rollout = play(one, replies(written_as, reasoning=reasoning, end=end, call_end=call_end))
    assert rollout.error is None
    assert (rollout.reward, rollout.tool_calls) == (1.0, 3)
    assert is_extended(rollout) == kept
    assert (rollout.retokenized_turns == 0) == kept
