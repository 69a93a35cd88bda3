"""``python -m tools.scaling VERB STUDY.yaml``: from a question about models and compute to a fitted
law, and to the run it recommends.

Exit codes: those of every command (``fem_common/README.md``). 1: also if runs failed or are
missing.
"""

from __future__ import annotations

import sys

from fem_common.cli import Verb, verb_main

VERBS = {
    "plan": Verb(
        "tools.scaling.verbs.plan",
        "show the runs of a study and their cost; refuse studies that cannot answer their question",
    ),
    "run": Verb(
        "tools.scaling.verbs.run",
        "train the unfinished runs through launch: as a job array, or on this machine",
    ),
    "collect": Verb("tools.scaling.verbs.collect", "write one table of the losses of all runs"),
    "fit": Verb("tools.scaling.verbs.fit", "fit scaling laws with their uncertainty to the table"),
    "plot": Verb(
        "tools.scaling.verbs.plot", "write pictures and the report from the table and the fits"
    ),
    "recommend": Verb(
        "tools.scaling.verbs.recommend",
        "write the configuration of the run that the laws recommend for a compute budget",
    ),
    "coord-check": Verb(
        "tools.scaling.verbs.coord_check",
        "check whether activations keep their scale over the widths",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return its exit code."""
    return verb_main(
        "tools.scaling",
        "Plan, run and evaluate scaling-law studies.",
        VERBS,
        argv,
    )


if __name__ == "__main__":
    sys.exit(main())
