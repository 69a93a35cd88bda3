"""Options that several verbs share."""

from __future__ import annotations

import argparse
from typing import Any

LIST: dict[str, Any] = {"action": "append", "default": []}
FLAG: dict[str, Any] = {"action": "store_true"}
OPTIONS: dict[str, dict[str, Any]] = {
    "directories": {
        "nargs": "+",
        "metavar": "DIR",
        "help": "directory of a run or a job, or of one item of an array",
    },
    "words": {
        "nargs": "*",
        "metavar": "CONFIG.yaml section.key=value",
        "help": "a run and settings that replace the file's",
    },
    "--cluster": {
        "required": True,
        "metavar": "PROFILE.yaml",
        "help": "the cluster's profile, in configs/cluster",
    },
    "--set": {
        **LIST,
        "metavar": "KEY=VALUE",
        "help": "a setting of the profile, as slurm.partition=x",
    },
    "--nodes": {"type": int, "default": 1, "metavar": "N", "help": "nodes (default: 1)"},
    "--processes": {
        "type": int,
        "metavar": "N",
        "help": "processes per node (default: the profile's; for a command: 1)",
    },
    "--name": {"help": "name in the queue (default: the run's, or the command's)"},
    "--directory": {
        "metavar": "DIR",
        "help": "folder for its files (default: the run's run_dir, or runs/jobs/NAME)",
    },
    "--update": {
        **FLAG,
        "help": "replace the settings and the code of an existing job",
    },
    "--tasks": {"type": int, "metavar": "N", "help": "for a command: a job array of N tasks"},
    "--at-once": {
        "type": int,
        "metavar": "K",
        "help": "for an array: the number of tasks at a time",
    },
    "--time": {
        "metavar": "LIMIT",
        "help": (
            "time limit of one submission; a run continues in the next one (default: the profile's)"
        ),
    },
    "--dependency": {
        **LIST,
        "metavar": "JOB",
        "help": "start after a job ended well: its directory, its id, or afterok:ID",
    },
    "--exclude": {
        **LIST,
        "metavar": "NODES",
        "help": "nodes not to use, in addition to the profile's",
    },
    "--no-rehearse": {
        **FLAG,
        "help": "submit runs on GPUs without a rehearsal of new layouts",
    },
    "--dry-run": {
        **FLAG,
        "help": "print the plan and the batch script without writing or submitting them",
    },
    "--parsable": {**FLAG, "help": "print only the job's id"},
}
PLACE = ("--nodes", "--processes", "--name", "--directory", "--set", "--update")
SLURM = (
    "--time",
    "--at-once",
    "--dependency",
    "--exclude",
    "--no-rehearse",
    "--dry-run",
    "--parsable",
)


def add(parser: argparse.ArgumentParser, *names: str, **changes: Any) -> None:
    """Add options of the table to a verb's parser, with further or other settings of argparse."""
    for name in names:
        parser.add_argument(name, **{**OPTIONS[name], **changes})
