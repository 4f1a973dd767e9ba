"""The layers that can have a LoRA are those of the whole decoder to whose products one can be added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from mint.engine.transformers.linear_layers import linear_layers


def _small(family: str) -> Any:
    config = AutoConfig.for_model(family, num_hidden_layers=2)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_layer_with_a_forward_of_its_own_stays_frozen() -> None:
    layers = linear_layers(_small("deepseek_v4"))
    assert {name.rsplit(".", 1)[-1] for name in layers} >= {"o_b_proj", "lm_head"}
    assert not any(name.endswith(".o_a_proj") for name in layers)


@pytest.mark.parametrize("family", ["modernbert-decoder", "falcon"])
def test_all_linear_layers_of_a_decoder_can_have_a_lora(family: str) -> None:
    model = _small(family)
    wanted = [name for name, module in model.base_model.named_modules() if isinstance(module, nn.Linear)]
    assert len(wanted) >= 8 and len(linear_layers(model)) == len(wanted) + 1  # and the unembedding
