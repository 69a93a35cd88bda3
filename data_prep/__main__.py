"""Command line of the package: ``python -m data_prep VERB``."""

from __future__ import annotations

import sys

from fem_common.cli import Verb, verb_main

VERBS = {
    "stdlib": Verb(
        "data_prep.verbs.stdlib", "gather the running Python's standard library as parquet"
    ),
    "train-tokenizer": Verb("data_prep.verbs.train_tokenizer", "train a BPE tokenizer"),
    "inspect": Verb(
        "data_prep.report.inspect", "look at inputs: schema, rows, a sample, what they will take"
    ),
    "plan": Verb("data_prep.verbs.plan", "cut inputs into units of work"),
    "run": Verb("data_prep.verbs.run", "encode text into train/valid/test .bin/.idx"),
    "status": Verb("data_prep.report.status", "how far a data folder is"),
    "merge": Verb(
        "data_prep.verbs.merge", "merge a job array's units into train/valid/test .bin/.idx"
    ),
    "verify": Verb("data_prep.verify", "check a data folder against its manifest"),
    "index": Verb(
        "data_prep.verbs.index", "build the sample indices that pretrain would build at its start"
    ),
    "stats": Verb(
        "data_prep.report.stats",
        "documents, tokens, lengths and drops of a data folder, and a picture",
    ),
    "blend": Verb(
        "data_prep.verbs.blend",
        "several data folders with weights, as the file that pretrain reads",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return its exit code. A failure prints one line."""
    return verb_main(
        "data_prep",
        "Text in, Megatron .bin/.idx out.",
        VERBS,
        argv,
        kept="what is finished is kept: the same command goes on",
    )


if __name__ == "__main__":
    sys.exit(main())
