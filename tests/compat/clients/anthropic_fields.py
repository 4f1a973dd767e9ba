"""Prints the fields of the request types of the `anthropic` package, and the kinds of blocks and tools, as JSON.

`tests/openai/anthropic_fields.json` keeps them, and its neighbours send each of them with odd values.
"""

from __future__ import annotations

import json
import sys
from typing import Any, get_args, get_type_hints

from anthropic import types
from anthropic.types import message_create_params, tool_result_block_param, tool_union_param
from anthropic.types.beta import message_create_params as beta_create_params


def fields(*kinds: Any) -> list[str]:
    return sorted({name for kind in kinds for name in get_type_hints(kind)})


def kinds(union: Any) -> list[str]:
    """The values of `type` in a union of typed dictionaries."""
    return sorted({value for member in get_args(union) for value in literals(get_type_hints(member)["type"])})


def literals(annotation: Any) -> list[str]:
    """The texts in `Literal[…]`, also within other annotations."""
    found = [value for value in get_args(annotation) if isinstance(value, str)]
    return found + [value for inner in get_args(annotation) for value in literals(inner)]


FOUND = {
    "request": fields(message_create_params.MessageCreateParamsBase, beta_create_params.MessageCreateParamsBase),
    "count": fields(types.MessageCountTokensParams),
    "message": fields(types.UserMessageParam, types.AssistantMessageParam, types.SystemMessageParam),
    "system": fields(types.TextBlockParam),
    "text": fields(types.TextBlockParam),
    "tool_use": fields(types.ToolUseBlockParam),
    "tool_result": fields(types.ToolResultBlockParam),
    "tool": fields(types.ToolParam),
    "tool_choice": fields(*get_args(types.ToolChoiceParam)),
    "output_config": fields(types.OutputConfigParam),
    "format": fields(types.JSONOutputFormatParam),
    "blocks": kinds(types.ContentBlockParam),
    "result_blocks": kinds(tool_result_block_param.Content),
    "tools": kinds(tool_union_param.ToolUnionParam),
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(FOUND, indent=1) + "\n")
