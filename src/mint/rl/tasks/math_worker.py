"""The process behind `math_grader`: compares two expressions with math-verify, one line of JSON per question.

It is run by path, not imported: it imports nothing of mint, and mint imports no sympy. Its input was written by a
model, so it limits its own memory, and a timer of the kernel ends it when a question takes too long.

    {"timeout_s": 3.0, "gold": "$\\\\frac{1}{2}$", "target": "$0.5$"}   →   1 equal · 0 not equal · ! error
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

MEMORY_BYTES = 1 << 30
NORMALIZATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="all", units=False)
"""`units=False`: units are compared before; here they would be dropped, and `2m` would equal 2."""
EXTRACTION = (LatexExtractionConfig(normalization_config=NORMALIZATION), ExprExtractionConfig())


def equal(gold: str, target: str) -> bool:
    """Whether the last expression of `target` is the one of `gold`. No time limits of its own: see `main`."""
    golds, targets = (parse(text, EXTRACTION, parsing_timeout=0) for text in (gold, target))
    return bool(golds and targets) and verify(golds, targets, timeout_seconds=None)


def main() -> None:
    """Answers questions until its input ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints must not be read as an answer
    logging.disable(logging.CRITICAL)  # log lines would hold the whole text
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    equal("$\\frac{1}{2}$", "$0.5$")  # the first comparison compiles the patterns
    answers.write(b"ready\n")
    for line in sys.stdin.buffer:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, question["timeout_s"])  # SIGALRM is not handled: it ends the process
        try:
            answer = b"1\n" if equal(question["gold"], question["target"]) else b"0\n"
        except Exception:  # noqa: BLE001 - the boundary to sympy, which may raise anything
            answer = b"!\n"
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(answer)


if __name__ == "__main__":
    main()
