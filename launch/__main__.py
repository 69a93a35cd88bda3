"""``python -m launch VERB``: run jobs on Slurm or on this machine, with restarts after failures."""

from __future__ import annotations

import sys

from fem_common import cli
from fem_common.cli import Verb

VERBS = {
    "submit": Verb("launch.verbs.submit", "submit a run, or another command, to Slurm"),
    "local": Verb("launch.verbs.local", "run the same on this machine, with the same restarts"),
    "sweep": Verb("launch.verbs.sweep", "start many runs of one configuration as a job array"),
    "status": Verb("launch.verbs.status", "show the state of runs, one line each"),
    "logs": Verb(
        "launch.verbs.logs", "print the ranks' output; --errors: the first failure and its cause"
    ),
    "cancel": Verb("launch.verbs.cancel", "end a run; --save: after a checkpoint"),
    "requeue": Verb(
        "launch.verbs.requeue", "continue a run that ended, or save and restart one that runs"
    ),
    "doctor": Verb(
        "launch.verbs.doctor", "check this machine, or a cluster profile against the cluster"
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return its exit code. A failure prints one line."""
    return cli.verb_main(
        "launch",
        "Run jobs on Slurm or on this machine, with restarts after failures.",
        VERBS,
        argv,
        kept="submitted jobs continue",
    )


if __name__ == "__main__":
    sys.exit(main())
