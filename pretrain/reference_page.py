"""Reference of all configuration keys, generated from the dataclasses.

``python -m pretrain.reference_page`` writes docs/configuration.md.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from fem_common.config import reference
from fem_common.errors import ConfigError
from fem_common.text import did_you_mean, markdown_table
from pretrain.config import RunConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

_HEAD = """# The configuration of a run

Written by `python -m pretrain.reference_page` from `pretrain/config.py` and
`fem_megatron/config.py`.

    python -m pretrain configs/run/demo.yaml train.steps=20 model.fem.gate=false run_dir=runs/plain

A run is a YAML file. Each section of it is one of
- a mapping of the keys below;
- the name of a part: `model: fem_sm_340m` reads `configs/model/fem_sm_340m.yaml` (the folder
  `model/` next to the run's folder);
- the path of a file, with a slash or ending in `.yaml`, relative to the folder of the file that
  contains it: `data: ../blend.yaml`;
- a mapping with `base: <part or path>` and keys that override the base's. A part may have a `base`
  too.

`section.key=value` on the command line overrides the file; the value is YAML. List items are
counted from 0 (`data.train.0.prefix=...`). A complete section can be replaced, which is done before
single keys are set: `model=transformer_340m` for a part, `data=blend.yaml` for a file, whose path
is relative to the working directory. Unknown keys, keys that no layer of the model reads, and
values of the wrong type or outside the allowed choices stop the program with exit code 2 and one
line for each mistake. Numbers may be written as `1e-4`, integers also as `15_000_000_000` or
`15e9`.

`python -m pretrain CONFIG.yaml --plan` prints the requirements of a run; `--resolve` prints its
complete configuration; `--check` checks the configuration and its data, with `--plan` also whether
the memory fits `log.device`; `--index` builds its index cache; `python -m pretrain --help SECTION`
prints a section of this page.
"""


def page() -> str:
    """Return the text of docs/configuration.md."""
    sections: dict[str, list[tuple[str, ...]]] = {"": []}
    titles = {"": "The run"}
    for row in reference(RunConfig):
        name = row.key.partition(".")[0] if "." in row.key else ""
        if not row.section:
            titles.setdefault(row.key, row.doc)  # title of a section whose entries form a list
            if row.default is None:
                default = "required"
            else:
                default = f"`{row.default}`" if row.default else "empty"
            sections.setdefault(name, []).append(
                (f"`{row.key}`", row.wanted, default, _cell(row.doc))
            )
        elif not name:
            sections[row.key], titles[row.key] = [], row.doc
    lines = [_HEAD]
    for section, rows in sections.items():
        lines.append(f"## {f'`{section}`: ' if section else ''}{titles[section]}\n")
        lines.append(markdown_table(("key", "value", "default", "meaning"), rows) + "\n")
    return "\n".join(lines)


def section_text(section: str) -> str:
    """Return a text for the terminal about the keys of a section or subsection (``model.fem``).

    Raises:
        ConfigError: the section does not exist.
    """
    rows = {row.key: row for row in reference(RunConfig)}
    if not any(key.startswith(f"{section}.") for key in rows):
        sections = [key for key, row in rows.items() if row.section]
        raise ConfigError(f"--help {section}: no such section; {did_you_mean(section, sections)}")
    lines = [f"{section}: {rows[section].doc}\n"]
    for key, row in rows.items():
        if key.startswith(section + ".") and not row.section:
            lines.append(
                f"{key} = {'(required)' if row.default is None else row.default or 'empty'}  "
                f"({row.wanted})"
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
