"""data_prep: what to say of a column that an input lacks. Knows no file format."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from data_prep.errors import UserError
from data_prep.sources.types import Columns

NAMED = 20


def missing_column(path: str, name: str, columns: Columns, names: Sequence[str], where: str) -> UserError:
    """The error for a column that is not among ``names``: with the nearest of them, or the option. ``where``: " in its first line"."""
    near = difflib.get_close_matches(name, names, n=1)
    listed = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    hints = [f"did you mean {near[0]!r}?"] if near else []
    if name == columns.text:
        hints = hints or ["name it with --text-column"]
    elif name == columns.id:
        hints += [f"name it with --id-column, or --id-column {columns.text} to split by the text itself"]
    else:
        hints = hints or ["a filter or the mask asks for it"]
    return UserError(f"{path} has no column {name!r}{where} (it has: {listed}); {' '.join(hints)}")
