"""Runs the whole matrix with the tinker SDK that this interpreter has: one JSON line for each cell, on stdout.

`python drive_sdk.py WORK_DIR BASE_MODEL [NAME…]`, in the SDK's own environment, with TINKER_BASE_URL and
TINKER_API_KEY set and nothing else. Imports nothing of mint. NAMEs choose cases by a part of their name.

A sampling client of this SDK loads its tokenizer by the base model's name, which is a name on the Hugging Face hub or
a folder below the working directory: for the bundled model, WORK_DIR gets a link to it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import cases_management
import cases_sampling
import cases_training
import tinker
from capability import CASES, Lab, run_case

MODULES = (cases_management, cases_sampling, cases_training)


def link_tokenizer(lab: Lab) -> None:
    """Makes the base model's name, seen from WORK_DIR, the folder that the server says has its tokenizer."""
    folder = Path(lab.trainer().get_info().model_data.tokenizer_id or "")
    link = lab.work_dir / lab.base_model
    if folder.is_absolute() and not link.exists():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
    os.chdir(lab.work_dir)


def main(work_dir: Path, base_model: str, names: list[str]) -> None:
    """Runs every case that is asked for, in order; a failed one stops nothing."""
    warnings.simplefilter("ignore")  # deprecations of the SDK's own methods: old scripts use them, and so does this
    work_dir.mkdir(parents=True, exist_ok=True)
    lab = Lab(tinker, tinker.ServiceClient(user_metadata={"driver": "matrix"}), base_model, work_dir)
    link_tokenizer(lab)
    for row in CASES:
        if not names or any(name in row.name for name in names):
            print(json.dumps(asdict(run_case(row, lab))), flush=True)
    os._exit(0)  # threads of cases that hang are left behind


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
