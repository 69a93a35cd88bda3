"""Reference of all configuration keys, generated from the dataclasses.

``python -m pretrain.reference_page`` writes docs/configuration.md.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from fem_common.config import reference
from fem_common.errors import ConfigError
from pretrain.config import RunConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

_HEAD = """# The configuration of a run

Written by `python -m pretrain.reference_page` from `pretrain/config.py` and `fem_megatron/config.py`.

    python -m pretrain configs/run/demo.yaml train.steps=100 model.fem.gate=false

A run is a YAML file. Each section of it is one of
- a mapping of the keys below;
- the name of a part: `model: fem_sm_340m` reads `configs/model/fem_sm_340m.yaml` (the folder beside the run's);
- the path of its own file, with a slash or ending in `.yaml`, from the folder of the file that names it: `data: ../blend.yaml`;
- a mapping with `base: <part or path>` and keys that go over the base's. A part may have a `base` too.

`section.key=value` on the command line goes over the file; the value is YAML. List items are counted from 0 (`data.train.0.prefix=...`),
and a whole section can be swapped, which comes before single keys: `model=transformer_340m` for a part, `data=blend.yaml` for a file, whose
path starts at the working directory. A key that is not on this page or that no layer of the model reads, a value of another type or outside
its choices stops the program with exit code 2 and a line for each mistake. Numbers may be written `1e-4`, whole ones also
`15_000_000_000` or `15e9`.
`python -m pretrain CONFIG.yaml --plan` prints what a run needs; `--resolve` prints its whole configuration; `--check` says whether it and
its data are right, with `--plan` also whether its memory fits `log.device`; `--index` builds its index cache; `python -m pretrain --help
SECTION` prints a section of this page.
"""


def page() -> str:
    """Return the text of docs/configuration.md."""
    sections: dict[str, list[str]] = {"": []}
    titles = {"": "The run"}
    for row in reference(RunConfig):
        name = row.key.partition(".")[0] if "." in row.key else ""
        if not row.section:
            titles.setdefault(row.key, row.doc)  # of a list's entries
            default = (
                "required"
                if row.default is None
                else f"`{row.default}`"
                if row.default
                else "empty"
            )
            sections.setdefault(name, []).append(
                f"| `{row.key}` | {row.wanted} | {default} | {_cell(row.doc)} |"
            )
        elif not name:
            sections[row.key], titles[row.key] = [], row.doc
    lines = [_HEAD]
    for section, rows in sections.items():
        lines.append(f"## {f'`{section}`: ' if section else ''}{titles[section]}\n")
        lines.append(
            "| key | value | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    return "\n".join(lines)


def section_text(section: str) -> str:
    """Return the keys of a section, or of a part of one (``model.fem``), for the terminal.

    Raises:
        ConfigError: the section does not exist.
    """
    rows = {row.key: row for row in reference(RunConfig)}
    if not any(key.startswith(f"{section}.") for key in rows):
        raise ConfigError(
            f"--help {section}: no such section; {', '.join(key for key, row in rows.items() if row.section)}"
        )
    lines = [f"{section}: {rows[section].doc}\n"]
    for key, row in rows.items():
        if key.startswith(section + ".") and not row.section:
            lines.append(
                f"{key} = {'(required)' if row.default is None else row.default or 'empty'}  ({row.wanted})"
            )
            lines.append(
                textwrap.fill(row.doc, 100, initial_indent="    ", subsequent_indent="    ")
            )
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Return text escaped for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
