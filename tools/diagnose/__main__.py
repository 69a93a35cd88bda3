"""``python -m tools.diagnose CHECKPOINT``: draw one picture of layers x quantities.

Errors are reported in one line.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fem_common.cli import Parser, run


def main(arguments: list[str] | None = None) -> int:
    """Compute the quantities, write the picture, print its path and return the exit code."""
    parser = Parser(
        prog="tools.diagnose",
        description="Draw the energies, entropies and step norms of every layer of a checkpoint in "
        "one picture.",
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint, or a run directory (its newest checkpoint)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PREFIX",
        help="a .bin/.idx pair; default: the run's validation (or training) data",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=256,
        metavar="N",
        help="read the first N tokens of the data (default: 256)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PNG",
        help="default: runs/diagnose/NAME.png, NAME being the checkpoint's folder",
    )
    given = parser.parse_args(arguments)
    given.out = given.out or Path("runs", "diagnose", f"{given.checkpoint.resolve().name}.png")
    if given.out.suffix != ".png":
        parser.error(f"--out {given.out}: the picture is a PNG, so its name must end in .png")

    def draw() -> None:
        # Importing torch and matplotlib takes seconds that --help or an error need not wait for.
        from tools.diagnose.from_checkpoint import diagnose

        found = diagnose(given.checkpoint, given.data, given.tokens)
        from tools.diagnose import picture

        given.out.parent.mkdir(parents=True, exist_ok=True)
        picture.draw(found.values, found.title, given.out)
        print(f"wrote {given.out}: {len(found.values)} numbers of {found.title}")

    return run("tools.diagnose", draw)


if __name__ == "__main__":
    sys.exit(main())
