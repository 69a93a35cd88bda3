"""What an evaluation shows, from its result files alone: table.md, results.json, table.png, heldout.png, and a table on the terminal.

    python -m tools.evaluate.report DIR... --suite paper --out merged

puts the results of several folders, of several machines say, into one table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from data_prep.store.files import write_whole
from fem_common.errors import CommandError, end, files_told

from . import render
from .scores import read
from .suite import Suite, load_suite
from .table import build, heldout


def report(out: Path, suite: Suite | None, folders: Sequence[Path] = ()) -> None:
    """Reads FOLDER/MODEL/NAME.json of the folders, of ``out`` where none is named, writes the report into ``out`` and prints the table.

    suite: the columns and their order; None: all results, by name.

    Raises:
        ScoreError: a file is no result, or the results do not belong into one table. ConfigError, StorageError: files cannot be read or
            written.
    """
    from . import picture  # matplotlib takes a second: not for --help or a wrong argument

    table = build(read(folders or [out]), suite)
    curves = picture.heldout(heldout(table))
    files = {
        "table.md": render.markdown(table).encode(),
        "results.json": (json.dumps(render.as_json(table), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(),
        "table.png": picture.png(picture.scores(table)),
    }
    if curves is not None:
        files["heldout.png"] = picture.png(curves)
    with files_told():
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(out / name, content)
        if curves is None:
            (out / "heldout.png").unlink(missing_ok=True)
    print(render.console(table), end="")
    print(f"\nwrote {', '.join(str(out / name) for name in files)}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Reports on folders of results; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools.evaluate.report", description="One table of the results in one or several folders.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a folder that tools.evaluate wrote")
    parser.add_argument("--suite", metavar="NAME|FILE", help="columns, order, groups, rescaling; default: all results, by name")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the report goes; of one DIR: that one by default")
    given = parser.parse_args(arguments)
    if given.out is None and len(given.folders) > 1:
        parser.error("--out DIR: say where the report of several folders goes")
    try:
        report(given.out or given.folders[0], load_suite(given.suite) if given.suite else None, given.folders)
    except (CommandError, OSError) as error:
        return end("tools.evaluate.report", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
