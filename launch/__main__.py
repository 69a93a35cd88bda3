"""``python -m launch VERB``: run jobs on Slurm or on this machine, with restarts after failures."""

from __future__ import annotations

import argparse
import sys

from fem_common import cli
from fem_common.cli import Verb

VERBS = {
    "submit": Verb("launch.verbs.submit", "submit a run, or any command of ours, to Slurm"),
    "local": Verb("launch.verbs.local", "the same on this machine, with the same restarts"),
    "sweep": Verb("launch.verbs.sweep", "many runs of one configuration as a job array"),
    "status": Verb("launch.verbs.status", "how runs stand, one line a run"),
    "logs": Verb("launch.verbs.logs", "what the ranks said; --errors: which failed first, and why"),
    "cancel": Verb("launch.verbs.cancel", "end a run; --save: after a checkpoint"),
    "requeue": Verb(
        "launch.verbs.requeue", "continue a run that ended, or save and restart one that runs"
    ),
    "doctor": Verb(
        "launch.verbs.doctor", "check this machine, or a cluster profile against the cluster"
    ),
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line into a namespace with the verb's ``main``. The words after ``--`` are
    in its ``rest``.
    """
    return cli.parse("launch", "Jobs on Slurm or this machine that keep going.", VERBS, argv)


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return its exit code. A failure prints one line."""

    def verb() -> int:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        return int(arguments.main(arguments))

    return cli.run("launch", verb, kept="jobs that were submitted go on")


if __name__ == "__main__":
    sys.exit(main())
