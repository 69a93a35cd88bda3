"""Command line of the package: ``python -m data_prep VERB``."""

from __future__ import annotations

import sys

from fem_common.cli import Verb, verb_main

VERBS = {
    "stdlib": Verb(
        "data_prep.verbs.stdlib", "write the running Python's standard library as parquet"
    ),
    "train-tokenizer": Verb("data_prep.verbs.train_tokenizer", "train a BPE tokenizer"),
    "inspect": Verb(
        "data_prep.report.inspect",
        "report the schema, rows, a sample and the encoding cost of inputs",
    ),
    "plan": Verb("data_prep.verbs.plan", "divide inputs into units of work"),
    "run": Verb("data_prep.verbs.run", "encode text into train/valid/test .bin/.idx"),
    "status": Verb("data_prep.report.status", "report the progress of a data folder"),
    "merge": Verb(
        "data_prep.verbs.merge", "merge a job array's units into train/valid/test .bin/.idx"
    ),
    "verify": Verb("data_prep.verify.command", "check a data folder against its manifest"),
    "index": Verb(
        "data_prep.verbs.index", "build the sample indices that pretrain would build at its start"
    ),
    "stats": Verb(
        "data_prep.report.stats",
        "report documents, tokens, lengths and dropped rows of a data folder",
    ),
    "blend": Verb(
        "data_prep.verbs.blend",
        "write several data folders with weights as a data section for pretrain",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return its exit code. A failure prints one line."""
    return verb_main(
        "data_prep",
        "Encode text into Megatron .bin/.idx files.",
        VERBS,
        argv,
        kept="finished work is kept: run the same command again to continue",
    )


if __name__ == "__main__":
    sys.exit(main())
