"""``python -m tools.papers VERB``: run the papers' experiments with the layers that pretraining
uses.

Exit codes: those of every command (``fem_common/README.md``).
"""

from __future__ import annotations

import sys

from fem_common.cli import Verb, verb_main

VERBS = {
    "list": Verb(
        "tools.papers.catalogue",
        "every experiment of the four papers: what it needs, what it costs, whether it can run here",
    ),
    "run": Verb("tools.papers.running", "train what is not done yet of one experiment"),
    "report": Verb(
        "tools.papers.report", "docs/papers.md: tables beside the papers' numbers, and pictures"
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return its exit code."""
    return verb_main(
        "tools.papers", "The four papers' experiments: list, run, report.", VERBS, argv
    )


if __name__ == "__main__":
    sys.exit(main())
