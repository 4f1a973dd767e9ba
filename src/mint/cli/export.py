"""`mint export`: a checkpoint as a folder that other tools load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mint.cli.run_names import RUN_HELP, complete_run, find_checkpoint
from mint.cli.terminal import fail
from mint.errors import MintError


class ExportFormat(StrEnum):
    """What `mint export` can write."""

    PEFT = "peft"
    HF = "hf"
    GGUF_READY = "gguf-ready"


FORMAT_HELP = "peft: the lora alone, for PEFT and vLLM; hf: a merged model; gguf-ready: one for llama.cpp's converter"


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help=f"mint://MODEL_ID/weights/NAME or …/sampler_weights/NAME; or {RUN_HELP}", autocompletion=complete_run
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="the folder to write; must not exist")],
    format: Annotated[ExportFormat, typer.Option(help=FORMAT_HELP)] = ExportFormat.PEFT,
    data_dir: Annotated[
        Path | None, typer.Option(help="where it is; if not given the server at MINT_BASE_URL, else MINT_HOME")
    ] = None,
) -> None:
    """Writes a checkpoint as PEFT, vLLM and transformers load it."""
    from mint.compose.export import export_checkpoint  # deferred: loads the service and the engine

    try:
        export_checkpoint(find_checkpoint(checkpoint, data_dir), output=output, format=format.value, data_dir=data_dir)
    except MintError as error:
        fail(error)
    typer.echo(str(output))
