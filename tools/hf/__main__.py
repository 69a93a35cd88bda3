"""``python -m tools.hf VERB``: parse the arguments and call the module of the verb."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from fem_common.cli import Parser, run

MODEL = (
    "a run directory (its newest checkpoint), a checkpoint step_NNNNNNNN, or a Hugging Face folder"
)


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code; 1 also if the compared models differ."""
    given = vars(_parser().parse_args(arguments))
    module, function = given.pop("place")

    def called() -> int:
        # Torch and transformers take seconds, which --help and a wrong argument need not wait.
        found = getattr(importlib.import_module(f"tools.hf.{module}"), function)(**given)
        return 1 if found is False else 0

    return run("tools.hf", called, kept="nothing was left behind")


def _parser() -> Parser:
    """Build the command's parser. Long, because every verb declares its options here."""
    parser = Parser(
        prog="python -m tools.hf",
        description="Checkpoints to the Hugging Face format and back; whether two are one model.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=Parser)

    verb = verbs.add_parser(
        "export",
        help="write a checkpoint as a folder that transformers loads",
        description="Writes a checkpoint, of any layout, as a folder that transformers loads: weights (safetensors), configuration, "
        "tokenizer, model card, and training.json, from which import restores the run. The plain Transformer becomes transformers' own "
        "Llama, Qwen2, Qwen3 or Mistral class; every other mixer brings the code that trained it (trust_remote_code=True). Needs no GPU, "
        "and the memory of two tensors. OUT appears when it is complete.",
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
        help="folder of the tokenizer; default: the checkpoint's own",
    )
    verb.add_argument(
        "--license",
        metavar="ID",
        dest="license_id",
        help="license of the weights, which the model card states: one that the Hub knows "
        "(apache-2.0, cc-by-4.0), or NAME=LINK; default: none is stated",
    )
    verb.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="cut the weights into files of this size; default: 5GB",
    )
    verb.add_argument(
        "--overwrite", action="store_true", help="replace OUT if an earlier export is there"
    )
    verb.set_defaults(place=("export", "export_checkpoint"))

    verb = verbs.add_parser(
        "import",
        help="write a Hugging Face folder as a checkpoint that training starts from",
        description="Writes a Hugging Face folder (an export, or a stock Llama, Mistral, Qwen2 or Qwen3) as a checkpoint of weights, which "
        "`python -m pretrain RUN.yaml model=CHECKPOINT/model.yaml checkpoint.load=CHECKPOINT` starts from at any layout. With --mixer the "
        "weights start a model of another mixer where shapes allow; what is copied and what is new is listed.",
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
        help="start this mixer's model from the weights (names: python -m pretrain --list-mixers)",
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
    verb.set_defaults(place=("import_folder", "import_folder"))

    verb = verbs.add_parser(
        "verify",
        help="compare two models: weights, activations, logits; name where they part",
        description="Compares two models: configuration, tokenizers, weights, the activations of every layer and the logits of fixed "
        "prompts; names the first layer that differs. Exit code 0: they are the same model; 1: they are not.",
    )
    verb.add_argument("a", type=Path, metavar="A", help=MODEL)
    verb.add_argument("b", type=Path, metavar="B", help="the same, of the other model")
    verb.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="prompts, one a line; default: built-in texts and token ids",
    )
    verb.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="allowed difference, relative to the largest; default: 1e-4, 2e-2 where one is bf16",
    )
    verb.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        dest="json_out",
        help="write the findings for machines, too",
    )
    verb.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="default: auto, a GPU where there is one",
    )
    verb.set_defaults(place=("verify", "verify"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
