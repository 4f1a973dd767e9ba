"""A calculator for the policy: arithmetic expressions, evaluated without `eval`, with bounded numbers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from mint.rl.tasks.tool_calls import ToolError, tool

MAX_EXPRESSION = 200
MAX_EXPONENT = 64
MAX_MAGNITUDE = 1e100

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    if len(expression) > MAX_EXPRESSION:
        raise ToolError(f"the expression is longer than {MAX_EXPRESSION} characters")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise ToolError("not an arithmetic expression") from error
    except OverflowError as error:
        raise ToolError(f"the value is beyond {MAX_MAGNITUDE:g}") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else str(value)


def _evaluate(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            one = _evaluate(left)
            other = _evaluate(right)
            if isinstance(op, ast.Pow) and (abs(other) > MAX_EXPONENT or (one < 0 and other != int(other))):
                raise ToolError(f"exponents go to {MAX_EXPONENT}, and are whole for negative numbers")
            return _bounded(_BINARY[type(op)](one, other))
    raise ToolError("only numbers, parentheses and + - * / // % ** are understood")


def _bounded(value: float) -> float:
    if not abs(value) <= MAX_MAGNITUDE:
        raise ToolError(f"the value is beyond {MAX_MAGNITUDE:g}")
    return value
