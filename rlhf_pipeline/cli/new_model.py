"""`rlhf-pipeline new-model`: make a checkpoint folder, small and untrained or from a GGUF file, without a download."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rlhf_pipeline.cli.output import echo
from rlhf_pipeline.cli.parser import natural, positive
from rlhf_pipeline.errors import MissingPathError, typed
from rlhf_pipeline.policies.model_source import empty_folder, resolve_source
from rlhf_pipeline.report.formatting import duration

HELP = "create a small untrained model from a text file, or a model folder from a GGUF file"
DETAILS = """\
Trains a tokenizer on the text, and writes a model folder that contains this tokenizer and a small untrained causal
language model. transformers can load the folder. With --gguf, reads a model from a GGUF file, dequantizes it
to float32, and writes it to a model folder. Nothing is downloaded.

examples:
  rlhf-pipeline new-model model --text train.jsonl --hidden-size 256 --num-layers 4
  rlhf-pipeline run gsm8k --set policy.path=model --set prompts.path=train.jsonl
  rlhf-pipeline new-model smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("folder", metavar="FOLDER", help="the model folder; must not exist yet")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text", metavar="FILE", help="the text file on which to train the tokenizer of the untrained model"
    )
    source.add_argument(
        "--gguf",
        metavar="FILE",
        help="the GGUF file that contains the model; --seed and the size options do not apply",
    )
    command.add_argument(
        "--vocab-size",
        type=positive,
        default=4096,
        metavar="N",
        help="number of tokens in the vocabulary (default: %(default)s)",
    )
    command.add_argument(
        "--hidden-size", type=positive, default=256, metavar="N", help="width of the model (default: %(default)s)"
    )
    command.add_argument(
        "--num-layers", type=positive, default=4, metavar="N", help="number of layers (default: %(default)s)"
    )
    command.add_argument(
        "--seed", type=natural, default=0, metavar="N", help="seed for the weights (default: %(default)s)"
    )


def execute(args: argparse.Namespace) -> int:
    """Make the model, after all checks that need no torch."""
    folder = empty_folder(args.folder)
    text = None if args.text is None else Path(args.text).expanduser()
    if text is None:
        resolve_source(args.gguf)
    elif not text.is_file():
        raise MissingPathError(
            f"there is no text file at {text}. Specify any text file, for example the JSONL file of your prompts."
        )
    from rlhf_pipeline.run.preflight import check_writable

    check_writable(folder, "FOLDER")
    echo("importing torch ...")
    started = time.perf_counter()
    from rlhf_pipeline.policies.new_model import model_from_gguf, new_model

    if text is None:
        model = model_from_gguf(folder, gguf=args.gguf)
    else:
        model = new_model(
            folder,
            text_file=text,
            vocab_size=args.vocab_size,
            hidden_size=args.hidden_size,
            num_layers=args.num_layers,
            seed=args.seed,
        )
    echo(
        f"{folder}: {model.num_parameters:,} parameters, {model.vocab_size:,} tokens, "
        f"created in {duration(time.perf_counter() - started)}"
    )
    echo(f"try it: rlhf-pipeline run gsm8k --set policy.path={typed(folder)} --set prompts.path=FILE.jsonl")
    return 0
