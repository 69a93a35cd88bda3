"""``python -m tools.hf VERB``. Reads arguments and tells errors in one line (exit code 2); the work is in the verbs' modules."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pretrain.loader import ConfigError

from .export import ExportError
from .from_checkpoint import DTYPES, export_checkpoint


def main(arguments: list[str] | None = None) -> int:
    """Runs one verb; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools.hf", description="The Hugging Face format.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verb = verbs.add_parser("export", help="write a checkpoint as a folder that stock transformers loads (trust_remote_code=True)")
    verb.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run directory (its newest checkpoint)")
    verb.add_argument("out", type=Path, metavar="OUT", help="the folder to write; must not exist or be empty")
    verb.add_argument("--dtype", choices=sorted(DTYPES), help="type of the weights; default: as in the checkpoint")
    verb.add_argument("--tokenizer", type=Path, metavar="DIR", help="folder of the tokenizer; default: the one the checkpoint names")
    verb.add_argument("--overwrite", action="store_true", help="replace OUT if it is not empty")
    given = parser.parse_args(arguments)
    try:
        export_checkpoint(given.checkpoint, given.out, given.dtype, given.tokenizer, given.overwrite)
    except (ConfigError, ExportError) as error:
        print(f"tools.hf: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
