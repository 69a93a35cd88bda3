"""``python -m tools.hf VERB``: parse the arguments and call the module of the verb."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fem_common.cli import Parser, call_verb
from fem_common.files import read_lines

from .paths import check_export, check_import, check_model, check_tokenizer_folder

MODEL = (
    "a run directory (its newest checkpoint), a checkpoint step_NNNNNNNN, or a Hugging Face folder"
)


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code; 1 also if the compared models differ."""
    return call_verb("tools.hf", _parser(), arguments, kept="no partial output was kept")


def _run(module: str, function: str, check: Callable[[Any], None], **given: Any) -> Any:
    """Call a function of the package, after ``check`` of the given paths.

    torch and transformers take seconds to import, which --help and wrong arguments avoid.
    """
    check(given)
    return getattr(importlib.import_module(f"tools.hf.{module}"), function)(**given)


def _check_export(given: dict[str, Any]) -> None:
    check_export(given["checkpoint"], given["out"], given["overwrite"])
    check_tokenizer_folder(given["tokenizer"])


def _check_import(given: dict[str, Any]) -> None:
    check_import(given["hf_dir"], given["out"], given["overwrite"])


def _check_models(given: dict[str, Any]) -> None:
    if given["prompts"] is not None:
        read_lines(given["prompts"])
    check_model(given["a"])
    check_model(given["b"])


def _parser() -> Parser:
    """Build the command's parser. Long, because it declares the options of all verbs."""
    parser = Parser(
        prog="python -m tools.hf",
        description=(
            "Convert checkpoints to the Hugging Face format and back, and compare two models."
        ),
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=Parser)

    verb = verbs.add_parser(
        "export",
        help="write a checkpoint as a folder that transformers loads",
        description=(
            "Write a checkpoint of any layout as a folder that transformers loads: weights"
            " (safetensors), configuration, tokenizer, model card, and training.json, from which"
            " import restores the run. The plain Transformer uses transformers' class for Llama,"
            " Qwen2, Qwen3 or Mistral; for every other mixer the folder contains its code"
            " (trust_remote_code=True). Needs no GPU, and memory for two tensors. OUT appears only"
            " when it is complete."
        ),
    )
    verb.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a run directory (its newest checkpoint), or a step_NNNNNNNN",
    )
    verb.add_argument(
        "out", type=Path, metavar="OUT", help="the folder to write; must not exist or be empty"
    )
    verb.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="type of the weights; default: as in the checkpoint",
    )
    verb.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder of the tokenizer; default: the tokenizer of the checkpoint",
    )
    verb.add_argument(
        "--license",
        metavar="ID",
        dest="license_id",
        help=(
            "license of the weights, for the model card: an id of the Hub "
            "(apache-2.0, cc-by-4.0), or NAME=LINK; default: the card states none"
        ),
    )
    verb.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="largest size of one file of weights; default: 5GB",
    )
    verb.add_argument(
        "--overwrite", action="store_true", help="replace OUT if it is an earlier export"
    )
    verb.add_argument(
        "--mtp",
        action="store_true",
        help="keep the modules of multi-token prediction, for tools.generate --speculative; the"
        " folder then contains its code, also of a plain Transformer",
    )
    verb.set_defaults(function=partial(_run, "export", "export_checkpoint", _check_export))

    verb = verbs.add_parser(
        "import",
        help="convert a Hugging Face folder to a checkpoint from which training starts",
        description=(
            "Write a Hugging Face folder (an export, or a stock Llama, Mistral, Qwen2 or Qwen3) as"
            " a checkpoint of weights, from which `python -m pretrain RUN.yaml"
            " model=CHECKPOINT/model.yaml checkpoint.load=CHECKPOINT` starts at any layout. With"
            " --mixer the weights initialise a model with another mixer where shapes allow; the"
            " command lists copied and new weights."
        ),
    )
    verb.add_argument(
        "hf_dir",
        type=Path,
        metavar="HF_DIR",
        help="the folder to read: config.json and safetensors",
    )
    verb.add_argument(
        "out",
        type=Path,
        metavar="CHECKPOINT",
        help="the folder to write; must not exist or be empty",
    )
    verb.add_argument(
        "--mixer",
        metavar="NAME",
        help=(
            "initialise a model with this mixer from the weights (names: python -m pretrain"
            " --list-mixers)"
        ),
    )
    verb.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        help="type of the weights; default: as in the folder",
    )
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="change the run's configuration; may be repeated",
    )
    verb.add_argument(
        "--overwrite", action="store_true", help="replace CHECKPOINT if it is not empty"
    )
    verb.set_defaults(function=partial(_run, "import_folder", "import_folder", _check_import))

    verb = verbs.add_parser(
        "verify",
        help="compare two models: weights, activations, logits; find the first difference",
        description=(
            "Compare two models: configuration, tokenizers, weights, the activations of every layer"
            " and the logits of fixed prompts; report the first layer that differs. Exit code 0:"
            " they are the same model; 1: they are not."
        ),
    )
    verb.add_argument("a", type=Path, metavar="A", help=MODEL)
    verb.add_argument("b", type=Path, metavar="B", help="the second model, in the same form")
    verb.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="file of prompts, one per line; default: built-in texts and token ids",
    )
    verb.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help=(
            "allowed difference, relative to the largest value; default: 1e-4, or 2e-2 if one model"
            " is bf16"
        ),
    )
    verb.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        dest="json_out",
        help="also write the results as JSON",
    )
    verb.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="default: auto, a GPU if one is available",
    )
    verb.set_defaults(function=partial(_run, "verify", "verify", _check_models))
    return parser


if __name__ == "__main__":
    sys.exit(main())
