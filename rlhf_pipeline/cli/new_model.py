"""`rlhf-pipeline new-model`: a small untrained checkpoint, for trying things without a download."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

from rlhf_pipeline.errors import DefinitionError, MissingPathError
from rlhf_pipeline.report.words import duration


def execute(args: argparse.Namespace) -> int:
    """Make the model; what can be checked without torch is checked first."""
    text, folder = Path(args.text).expanduser(), Path(args.folder).expanduser()
    if not text.is_file():
        raise MissingPathError(f"there is no text file at {text}. Any text will do, for example your prompts' JSONL.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DefinitionError(f"{folder} exists already and is not an empty folder. Name another.")
    print("importing torch ...", flush=True)
    started = time.perf_counter()
    from rlhf_pipeline.policies.new_model import new_model

    made = new_model(
        folder,
        text_file=text,
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        seed=args.seed,
    )
    print(
        f"{folder}: {made.num_parameters:,} parameters, {made.vocab_size:,} tokens, "
        f"made in {duration(time.perf_counter() - started)}"
    )
    print(f"try it: rlhf-pipeline run gsm8k --set policy.path={shlex.quote(str(folder))} --set prompts.path=FILE.jsonl")
    return 0
