"""``python -m tools.hf VERB``. Reads arguments and tells errors in one line; the work is in the verbs' modules."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fem_common.cli import Parser, run

MODEL = "a run directory (its newest checkpoint), a checkpoint step_NNNNNNNN, or a Hugging Face folder"


def main(arguments: list[str] | None = None) -> int:
    """Runs one verb; returns the exit code; 1 also where models differ."""
    given = _parser().parse_args(arguments)
    return run("tools.hf", lambda: given.run(given), kept="nothing was left behind")


def _parser() -> Parser:
    parser = Parser(prog="python -m tools.hf", description="Checkpoints to the Hugging Face format and back; whether two are one model.")
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=Parser)

    verb = _verb(
        verbs,
        "export",
        "write a checkpoint as a folder that transformers loads",
        "Writes a checkpoint, of any layout, as a folder that transformers loads: weights (safetensors), configuration, tokenizer, model "
        "card, and training.json, from which import restores the run. The plain Transformer becomes transformers' own Llama, Qwen2 or "
        "Mistral class; every other mixer brings the code that trained it (trust_remote_code=True). Needs no GPU, and the memory of two "
        "tensors. OUT appears when it is complete.",
    )
    verb.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a run directory (its newest checkpoint), or a step_NNNNNNNN")
    verb.add_argument("out", type=Path, metavar="OUT", help="the folder to write; must not exist or be empty")
    verb.add_argument("--dtype", choices=["bfloat16", "float32"], help="type of the weights; default: as in the checkpoint")
    verb.add_argument("--tokenizer", type=Path, metavar="DIR", help="folder of the tokenizer; default: the checkpoint's own")
    verb.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="cut the weights into files of this size; default: 5GB")
    verb.add_argument("--overwrite", action="store_true", help="replace OUT if an earlier export is there")
    verb.set_defaults(run=_export)

    verb = _verb(
        verbs,
        "import",
        "write a Hugging Face folder as a checkpoint that training starts from",
        "Writes a Hugging Face folder (an export, or a stock Llama, Mistral or Qwen2) as a checkpoint of weights, which "
        "`python -m pretrain RUN.yaml model=CHECKPOINT/model.yaml checkpoint.load=CHECKPOINT` starts from at any layout. With --mixer the "
        "weights start a model of another mixer where shapes allow; what is copied and what is new is listed.",
    )
    verb.add_argument("hf_dir", type=Path, metavar="HF_DIR", help="the folder to read: config.json and safetensors")
    verb.add_argument("out", type=Path, metavar="CHECKPOINT", help="the folder to write; must not exist or be empty")
    verb.add_argument("--mixer", metavar="NAME", help="start this mixer's model from the weights (names: python -m pretrain --list-mixers)")
    verb.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="type of the weights; default: as in the folder")
    verb.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="change the run's configuration; may be repeated"
    )
    verb.add_argument("--overwrite", action="store_true", help="replace CHECKPOINT if it is not empty")
    verb.set_defaults(run=_import)

    verb = _verb(
        verbs,
        "verify",
        "compare two models: weights, activations, logits; name where they part",
        "Compares two models: configuration, tokenizers, weights, the activations of every layer and the logits of fixed prompts; names "
        "the first layer that differs. Exit code 0: they are the same model; 1: they are not.",
    )
    verb.add_argument("a", type=Path, metavar="A", help=MODEL)
    verb.add_argument("b", type=Path, metavar="B", help="the same, of the other model")
    verb.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, one a line; default: built-in texts and token ids")
    verb.add_argument(
        "--tolerance", type=float, metavar="X", help="allowed difference, relative to the largest; default: 1e-4, 2e-2 where one is bf16"
    )
    verb.add_argument("--json", type=Path, metavar="FILE", dest="json_out", help="write the findings for machines, too")
    verb.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto, a GPU where there is one")
    verb.set_defaults(run=_verify)
    return parser


def _verb(verbs: argparse._SubParsersAction[Parser], name: str, short: str, long: str) -> Parser:
    return verbs.add_parser(name, help=short, description=long)


# Each imports its module when it is called: torch and transformers take seconds, which --help and a wrong argument need not wait.


def _export(given: argparse.Namespace) -> int:
    from .export import export_checkpoint

    export_checkpoint(
        given.checkpoint,
        given.out,
        dtype=given.dtype,
        tokenizer=given.tokenizer,
        max_shard_size=given.max_shard_size,
        overwrite=given.overwrite,
    )
    return 0


def _import(given: argparse.Namespace) -> int:
    from .import_folder import import_folder

    import_folder(given.hf_dir, given.out, mixer=given.mixer, dtype=given.dtype, settings=given.settings, overwrite=given.overwrite)
    return 0


def _verify(given: argparse.Namespace) -> int:
    from .verify import verify

    equal = verify(given.a, given.b, prompts=given.prompts, tolerance=given.tolerance, json_out=given.json_out, device=given.device)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
