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
        "list the experiments of the four papers: requirements, costs, and whether this tool can"
        " run them",
    ),
    "run": Verb("tools.papers.running", "run the missing trials of one experiment"),
    "report": Verb(
        "tools.papers.report", "write docs/papers.md: tables with the papers' numbers, and pictures"
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return its exit code."""
    return verb_main(
        "tools.papers", "List, run and report the experiments of the four papers.", VERBS, argv
    )


if __name__ == "__main__":
    sys.exit(main())
