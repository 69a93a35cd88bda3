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
        "tools.scaling.plan",
        "the runs of a study and their cost; refuses what would not answer its question",
    ),
    "run": Verb(
        "tools.scaling.running",
        "train what is not done yet, through launch: a job array, or on this machine",
    ),
    "collect": Verb("tools.scaling.collecting", "one table of all runs' losses"),
    "fit": Verb("tools.scaling.fitting", "scaling laws with their uncertainty, from the table"),
    "plot": Verb("tools.scaling.plotting", "pictures and the report, from the table and the fits"),
    "recommend": Verb(
        "tools.scaling.recommending",
        "the run that the laws recommend for a compute budget, as a configuration",
    ),
    "coord-check": Verb(
        "tools.scaling.coordinates", "whether activations keep their scale over the widths"
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return its exit code."""
    return verb_main(
        "tools.scaling",
        "Scaling-law studies: plan, run, collect, fit, plot, recommend.",
        VERBS,
        argv,
    )


if __name__ == "__main__":
    sys.exit(main())
