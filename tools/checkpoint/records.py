"""Copy the files of the run directory to and from a mirror, and check that the mirror belongs to
the run. The module does not import torch.

URL/run/run_id.json records the run and the run directory that own the mirror
(`pretrain.run_directory.identify`). It is written before any other file, and compared before files
are sent or fetched. The manifests of checkpoints contain the run's id too.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fem_common.errors import ConfigError
from fem_common.files import write_atomically
from pretrain.checkpoint.folder import MANIFEST, MIRROR_STATE, newest_first
from pretrain.run_directory import RUN_ID, identify, record_of, run_id

if TYPE_CHECKING:
    from tools.checkpoint.mirror import Mirror

RECORDS = "run"
_UNREADABLE = (FileNotFoundError, ValueError, KeyError, TypeError)
_CHOOSE = "choose another mirror"


def admit(place: Mirror, run_dir: Path, *, by_run: bool) -> tuple[str | None, bool]:
    """Decide whether a run directory may use the checkpoints of a mirror that another run may own.

    A user (by_run False) may let a run directory that has no run yet take over the run of the
    mirror. The run itself (by_run True) may do so only if its run directory is the recorded one and
    was lost.

    Returns:
        The record for the run directory (None: it does not change), and True if the mirror is
        known to belong to this run.

    Raises:
        ConfigError: the mirror belongs to another run.
    """
    owner, own = _owner(place), run_id(run_dir)
    if owner is None or own == owner["run"]:
        return None, owner is not None
    new = not newest_first(run_dir / "checkpoints")
    lost = own is None and new and owner["run_dir"] == str(run_dir.resolve())
    if not (lost if by_run else new or own is None):
        way = ""
        if new:
            command = f"python -m tools.checkpoint fetch {run_dir} {place.url}"
            way = f"; if it is this run, take it over: {command}"
        raise _another(place, owner, way)
    return record_of(owner["run"], run_dir), False


def claim(place: Mirror, run_dir: Path, step: Path | None) -> None:
    """Record the run in ``run_dir`` as the owner of a mirror that has no owner.

    A mirror of an older version may have checkpoints but no record. It is claimed with the first
    checkpoint to send, in the folder ``step``, and only if both have the same model and data. It is
    not claimed while ``step`` is None.

    Raises:
        ConfigError: the mirror belongs to another run, or its model or data differ.
    """
    run, owner = identify(run_dir), _owner(place)
    if owner and owner["run"] != run:
        raise _another(place, owner)
    for name in [] if owner else place.steps()[:1]:
        if step is None:
            return
        ours = theirs = json.loads((step / MANIFEST).read_text())
        with suppress(ValueError):  # damaged
            theirs = place.manifest(name)
        key = "training_data" if "training_data" in theirs.keys() & ours.keys() else "data"
        if (theirs[key], theirs["config"]["model"]) != (ours[key], ours["config"]["model"]):
            raise ConfigError(
                f"{place.url} contains checkpoints of another run, with another model or other"
                f" data: {_CHOOSE}"
            )
    if owner is None or owner["run_dir"] != str(run_dir.resolve()):
        place.put_text(record_of(run, run_dir), f"{RECORDS}/{RUN_ID}")


def send_records(place: Mirror, run_dir: Path) -> None:
    """Send the files of the run directory, except hidden ones and mirror.json, to URL/run."""
    for file in sorted(run_dir.iterdir()):
        if file.is_file() and not file.name.startswith(".") and file.name != MIRROR_STATE:
            place.put(file, f"{RECORDS}/{file.name}")


def bring_records(place: Mirror, folder: Path) -> None:
    """Copy the .jsonl files of a run (losses, evaluations, attempts) from the mirror to ``folder``.

    ``folder`` is inside the run directory. Files that the run directory already has are not copied.
    """
    with suppress(FileNotFoundError):
        for entry in place.fs.ls(f"{place.root}/{RECORDS}", detail=True):
            name = Path(entry["name"]).name
            if name.endswith(".jsonl") and not (folder.parent / name).exists():
                write_atomically(folder / name, place.fs.cat_file(entry["name"]))


def _owner(place: Mirror) -> dict[str, str] | None:
    """Return ``run`` (its id) and ``run_dir`` of the run that owns a mirror; None if unknown.

    If the record is lost, the newest manifest is used.
    """
    # List first: if the store refuses, the error of a listing contains the reason, unlike that of a
    # read.
    names = place.steps()[:1]
    with suppress(*_UNREADABLE):
        record = json.loads(place.fs.cat_file(f"{place.root}/{RECORDS}/{RUN_ID}"))
        return {key: str(record[key]) for key in ("run", "run_dir")}
    for name in names:
        with suppress(*_UNREADABLE):
            manifest = place.manifest(name)
            if not manifest["run"]:
                return None
            return {"run": manifest["run"], "run_dir": str(manifest["config"]["run_dir"])}
    return None


def _another(place: Mirror, owner: dict[str, str], way: str = "") -> ConfigError:
    return ConfigError(
        f"{place.url} belongs to another run, with run_dir {owner['run_dir']}: {_CHOOSE}{way}"
    )
