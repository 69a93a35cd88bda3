"""Describe and plan a job, and write its files: job.json, code snapshot and batch script."""

from launch.job.job import (
    TAIL_BYTES,
    Item,
    Job,
    append_json,
    attempts,
    last_bytes,
    last_json_lines,
    last_lines,
    launch_folder,
    load_job,
    rank_log,
    rank_record,
    read_json,
    read_json_lines,
    write_json,
)

__all__ = [
    "TAIL_BYTES",
    "Item",
    "Job",
    "append_json",
    "attempts",
    "last_bytes",
    "last_json_lines",
    "last_lines",
    "launch_folder",
    "load_job",
    "rank_log",
    "rank_record",
    "read_json",
    "read_json_lines",
    "write_json",
]
