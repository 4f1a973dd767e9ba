"""A plugin of pytest: the kernels in C are compiled in the way that `MINT_TEST_KERNELS` names, for every test of a run.

`sanitized` is the processor's own set of instructions under AddressSanitizer and UndefinedBehaviorSanitizer, whose
libraries must be preloaded; all others are names of sets.
"""

from __future__ import annotations

import os

from mint.engine import instruction_sets
from mint.engine.cpu import build

# With -O2, GCC takes minutes for the checks of one unrolled loop.
SANITIZERS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1")

VARIANT = os.environ["MINT_TEST_KERNELS"]
if VARIANT == "sanitized":
    build.FLAGS = (*build.FLAGS, *SANITIZERS)
else:
    instruction_sets.SETS = tuple(own for own in instruction_sets.SETS if own.name == VARIANT)
