"""``collect``: write the losses of a study's runs into one table, from run directories or an export
of Weights & Biases. The module does not import torch.

    collect STUDY.yaml [--wandb EXPORT.jsonl] [--partial] [--out FILE] [--results FOLDER]

Writes runs.csv in the study's results, with one row per validation of a run, and collected.json,
which lists missing runs. If runs are missing, failed or unfinished, they are reported and no file
is written, unless --partial is given. Runs whose losses are not comparable are refused: different
data, tokenizer, or a configuration that differs from the study's plan.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fem_common.config import plain
from fem_common.errors import ConfigError, convert_os_errors
from fem_common.files import read_lines, sha256, sha256_json
from fem_common.nested import leaves
from pretrain.config import RunConfig, Source, load_run, run_of
from pretrain.data.facts import Contents, SourceContents, check_contents, check_data, read_manifest
from pretrain.plan.run_plan import flops_per_token
from pretrain.report.history import History
from pretrain.report.progress_file import read_progress
from pretrain.schedule import Schedule
from tools.scaling.planned_runs import (
    PlannedRun,
    begins_at,
    non_embedding_parameters,
    plan_study,
    total_parameters,
)
from tools.scaling.study import TABLE, Study, add_study, study_of
from tools.scaling.table import as_table, check_table, write_file, write_table

COLLECTED = "collected.json"
_NAMED = 10  # largest number of incomplete runs that are listed individually


class Found(NamedTuple):
    """A planned run with a record, and the identity of its data."""

    planned: PlannedRun
    record: Record
    data: DataIdentity


@dataclass(frozen=True)
class Collected:
    """Content of collected.json: numbers of planned and complete runs, and the reason for each run
    that is not complete.
    """

    planned: int
    complete: int
    left_out: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_study(parser)
    parser.add_argument(
        "--wandb",
        type=Path,
        metavar="EXPORT.jsonl",
        help="an export of Weights & Biases, for runs without a run directory on this machine",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="write the table even if runs are missing; collected.json lists them",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="path of the table, .csv or .parquet (default: runs.csv in the results of the study)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Write the table and return 0, or 1 if runs are missing. Raises ConfigError, StorageError."""
    study = study_of(arguments)
    out = arguments.out or Path(study.results) / TABLE
    if out.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--out {out}: expected a path that ends with .csv or .parquet")
    planned = plan_study(study)
    found, left_out = find_runs(study, planned, arguments.wandb)
    collected = Collected(
        len(planned), sum(not entry.record.unfinished for entry in found), left_out
    )
    if left_out:
        lines = [f"{len(left_out)} of {len(planned)} runs are not complete:"]
        lines += [f"  {name}: {why}" for name, why in list(left_out.items())[:_NAMED]]
        if len(left_out) > _NAMED:
            lines.append(f"  and {len(left_out) - _NAMED} more")
        if not arguments.partial:
            run = (
                f"python -m tools.scaling run {arguments.study} (it skips the complete runs in"
                f" {study.directory})"
            )
            lines.append(
                f"tools.scaling: no table was written. Train the missing runs: {run}, or collect"
                " the complete ones with --partial"
            )
        print("\n".join(lines), file=sys.stdout if arguments.partial else sys.stderr)
        if not arguments.partial:
            return 1
    if not collected.complete:
        raise ConfigError(
            f"{study.path}: none of its {len(planned)} runs is complete, so no table can be written"
        )
    rows = []
    for entry in found:
        rows += table_rows(entry.record, entry.planned, entry.data)
    table = as_table(rows)
    check_table(table, out)
    write_table(table, out)
    write_file(out.with_name(COLLECTED), (json.dumps(asdict(collected), indent=1) + "\n").encode())
    print(
        f"wrote {out}: {len(table)} validations of {table['run'].nunique()} runs,"
        f" {collected.complete} of them complete"
    )
    for note in _notes(found):
        print(f"note: {note}")
    return 0


def find_runs(
    study: Study, planned: Iterable[PlannedRun], export: Path | None
) -> tuple[list[Found], dict[str, str]]:
    """Return (runs with a record, in the order of the plan; name -> reason for incomplete runs).

    A run directory has precedence over a line of the export. Raises ConfigError (a run differs from
    the study's plan, has no losses, or its data is unknown), StorageError.
    """
    exported = read_export(export) if export is not None else {}

    def left(name: str) -> Record | None:
        return read_directory(Path(study.directory) / name) or exported.get(name)

    found, left_out = [], {}
    for run in planned:
        folder, record = Path(study.directory) / run.name, left(run.name)
        if record is None:
            left_out[run.name] = f"not begun: {folder} does not exist"
            if export:
                left_out[run.name] += ", and the export does not contain it"
            continue
        difference = difference_from_plan(load_run(study.base, run.settings), record.config)
        if difference is not None:
            key, wanted, held = difference
            raise ConfigError(
                f"{record.place}: it was trained with {key} = {json.dumps(held)}, but {study.path}"
                f" now plans {json.dumps(wanted)}; undo the change of the study, or move the run"
                " away and run it again"
            )
        record = after_trunk(record, run, left(run.trunk) if run.trunk else None)
        if record is None:
            left_out[run.name] = f"a fork of {run.trunk}, which has no record"
            continue
        if record.unfinished:
            left_out[run.name] = record.unfinished
        else:
            record.check()
        if record.unfinished and not record.validations:
            continue
        try:
            data = data_identity(record.config, record.directory)
        except ConfigError as error:
            raise ConfigError(f"{record.place}: {error}") from None
        found.append(Found(run, record, data))
    return found, left_out


def _notes(found: list[Found]) -> list[str]:
    """Return notes for the reader of the table."""
    notes, first = [], found[0]
    ours = heldout_tokens(first.record.config)
    other = next((entry for entry in found if heldout_tokens(entry.record.config) != ours), None)
    if other is not None:
        notes.append(
            f"held-out losses were measured on samples of different sizes: {ours:,} tokens in"
            f" {first.planned.name}, {heldout_tokens(other.record.config):,} in"
            f" {other.planned.name}; set train.eval_batches so that they agree"
        )
    if not first.data.tokenizer:
        notes.append(
            "the tokenizer of the runs is not recorded, so it is not checked that they share one"
        )
    return notes


def read_collected(table: Path) -> Collected | None:
    """Return the collected.json of a table, or None if ``collect`` did not write the table. Raises
    ConfigError if it is damaged.
    """
    file = table.with_name(COLLECTED)
    if not file.is_file():
        return None
    try:
        return Collected(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise ConfigError(
            f"{file}: not a file of collect; write it again: python -m tools.scaling collect"
            " STUDY.yaml"
        ) from None


# --- identity of a run and of its data ------------------------------------------------------------
# Held-out losses are comparable between runs that read the same tokens in sequences of the same
# length; a loss per token is not comparable across tokenizers.


DIGITS = 16  # digits of a hash in the table
# Keys of paths, layout and logging, which do not influence the training. A section includes all
# its keys.
_NO_MATTER = (
    "name run_dir data.tokenizer data.index_cache data.store_cache data.store_cache_gb data.test"
    " parallel log evaluate "
    "model.attention_backend train.micro_batch_size train.recompute train.eval_interval"
    " train.max_bad_steps checkpoint.interval "
    "checkpoint.keep_last checkpoint.async_save checkpoint.resume checkpoint.gb_per_second"
    " checkpoint.mirror checkpoint.mirror_interval "
    "checkpoint.mirror_keep_last checkpoint.max_unsaved_steps checkpoint.keep "
    # compared by `after_trunk`: a fork continues its trunk like an uninterrupted run
    "checkpoint.fork"
).split()
_FROM_DATA = ("model.vocab_size",)  # set from the data if it is null in the study


@dataclass(frozen=True)
class DataIdentity:
    """Identity of a run's data, by which runs are compared.

    ``contents`` is the hash `Contents.key` of the training and validation data, ``weights`` the
    shares of their sources, ``tokenizer`` the sha256 of the tokenizer (empty if unknown).
    """

    contents: str
    weights: tuple[tuple[float, ...], ...]
    seq_length: int
    tokenizer: str

    @property
    def key(self) -> str:
        """Hexadecimal hash of everything except the tokenizer, which has its own column."""
        return _hash([self.contents, self.weights, self.seq_length])


def data_identity(config: RunConfig, run: Path | None) -> DataIdentity:
    """Return the identity of the data that a run read.

    It is read from the run's newest checkpoint and from the manifests of the data. ``run`` is the
    run's directory, or None for a run that is known only from Weights & Biases. A dataset without a
    manifest is identified by its .idx file and a sample of its .bin file. Raises ConfigError
    (neither checkpoint nor data exists, or the data on disk differs from the run's), StorageError.
    """
    with convert_os_errors():
        recorded = _recorded(run) if run is not None else None
        held = _held(config)
    if recorded is None and held is None:
        prefix = config.data.train[0].prefix if config.data.train else "data.train"
        raise ConfigError(
            f"the data that it read is unknown: {prefix} does not exist and the run has no"
            " checkpoint; run collect on the machine with the data, from the folder that the run"
            " was started in"
        )
    if recorded is not None and held is not None and recorded != held:
        raise ConfigError(
            f"it was trained on other data (contents {recorded[:12]}) than"
            f" {config.data.train[0].prefix} contains now ({held[:12]}); restore the data, or run"
            " it again"
        )
    shares = (_shares(config.data.train), _shares(config.data.valid))
    return DataIdentity(recorded or held or "", shares, config.data.seq_length, _tokenizer(config))


def config_hash(config: RunConfig, data: DataIdentity) -> str:
    """Return a hash of everything that determines what the run learns.

    Included are the model, the contents of the data, batch, length, seed and optimizer. Names,
    paths and the parallel layout are not.
    """
    return _hash([sorted(learning_settings(config).items()), data.key, data.tokenizer])


def difference_from_plan(planned: RunConfig, found: RunConfig) -> tuple[str, Any, Any] | None:
    """Return (key, planned value, run's value) of the first learning-relevant key that differs from
    the plan, or None.
    """
    wanted, held = learning_settings(planned), learning_settings(found)
    for key in wanted | held:
        one, other = wanted.get(key), held.get(key)
        if one != other and not (one is None and key in _FROM_DATA):
            return key, one, other
    return None


def heldout_tokens(config: RunConfig) -> int:
    """Return the number of validation tokens that one validation of the run reads."""
    return config.train.eval_batches * config.train.global_batch_size * config.data.seq_length


def learning_settings(config: RunConfig) -> dict[str, Any]:
    """Return key -> value of everything that decides what a run learns."""
    no_matter = re.compile(rf"({'|'.join(map(re.escape, _NO_MATTER))})(\..*)?|.*\.prefix")
    return {
        key: value
        for key, value in leaves(plain(config))
        if value != {} and not no_matter.fullmatch(key)
    }


def _shares(sources: tuple[Source, ...]) -> tuple[float, ...]:
    total = sum(source.weight for source in sources)
    return tuple(round(source.weight / total, 9) for source in sources)


def _recorded(run: Path) -> str | None:
    """Return `Contents.key` from the manifest of the newest checkpoint, or None without one."""
    latest = run / "checkpoints" / "latest"
    if not latest.is_file():
        return None
    manifest = latest.parent / latest.read_text(encoding="utf-8").strip() / "manifest.json"
    if not manifest.is_file():
        return None
    try:
        label = json.loads(manifest.read_bytes()).get("data")
    except (ValueError, AttributeError):
        raise ConfigError(
            f"{manifest} is damaged: not a JSON mapping; run it again, or remove the checkpoint"
        ) from None
    return str(label) if label else None


def _held(config: RunConfig) -> str | None:
    """Return `Contents.key` of the files at the configuration's prefixes; None if a source is
    missing.
    """
    sources: list[SourceContents] = []
    for split in ("train", "valid"):
        for source in getattr(config.data, split):
            path = Path(source.prefix)
            manifest = read_manifest(path.parent / "manifest.json")
            if manifest is None:
                return _read(config)
            if path.name not in manifest.splits:
                return None
            entry = manifest.splits[path.name]
            mask = (entry["mask"] or {}).get("sha256", "")
            hashes = entry["idx_sha256"], entry["bin_sha256"], mask
            sources.append(SourceContents(split, source.prefix, *hashes))
    return Contents(tuple(sources)).key if sources else None


def _read(config: RunConfig) -> str | None:
    for source in (*config.data.train, *config.data.valid):
        for ending in (".bin", ".idx"):
            if not Path(source.prefix + ending).is_file():
                return None
    return check_contents(check_data(config)).key


def _tokenizer(config: RunConfig) -> str:
    """Return the sha256 of the tokenizer.

    It is the one in the manifest of the training data. Without a manifest it is that of the
    configured tokenizer file. If neither exists, the result is an empty string.
    """
    for source in config.data.train:
        manifest = read_manifest(Path(source.prefix).parent / "manifest.json")
        if manifest is not None:
            return str(manifest.tokenizer["sha256"])
    file = Path(config.data.tokenizer) / "tokenizer.json" if config.data.tokenizer else None
    return sha256(file) if file is not None and file.is_file() else ""


def _hash(value: Any) -> str:
    return sha256_json(value, sort_keys=False)[:DIGITS]


EXPORTED_KEYS = ("step", "loss", "step_seconds", "valid_loss")


class Step(NamedTuple):
    """A logged training step; ``seconds`` cover all steps since the previously logged one."""

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Record:
    """Configuration and measurements of one run: its steps and validations, each step once.

    ``place`` is the directory or the line of the export, for messages. ``unfinished`` is the reason
    why the run is not complete; empty if it is complete.
    """

    place: str
    source: str
    config: RunConfig
    steps: tuple[Step, ...]
    validations: tuple[tuple[int, float], ...]
    unfinished: str
    directory: Path | None = None

    def check(self) -> None:
        """Raise ConfigError if a complete run has no loss, or a loss that is not a number."""
        last = Schedule.of(self.config).steps
        if not self.validations or (not self.unfinished and self.validations[-1][0] != last):
            raise ConfigError(
                f"{self.place}: it has no validation at its last step, {last}; give it data.valid"
                " and run it again, or leave it out of the study"
            )
        for step, loss in self.validations:
            if not math.isfinite(loss):
                raise ConfigError(
                    f"{self.place}: valid_loss = {loss} at step {step}: the run diverged; lower its"
                    " learning rate and run it again, or leave it out of the study"
                )


def read_directory(folder: Path) -> Record | None:
    """Return the run in a directory, or None if no run was started in it.

    Raises ConfigError (this code does not support its configuration), StorageError.
    """
    if not (folder / "config.yaml").is_file():
        return None
    config = load_run(folder / "config.yaml")
    with convert_os_errors():
        history = History.read(folder)
    steps = tuple(
        Step(entry["step"], entry["loss"], entry["step_seconds"]) for entry in history.steps
    )
    why = _unfinished(folder, config)
    return Record(str(folder), "run_dir", config, steps, history.validations, why, folder)


def _unfinished(folder: Path, config: RunConfig) -> str:
    progress, steps = read_progress(folder), Schedule.of(config).steps
    if progress is None:
        return "not begun: no progress.json"
    state, at = progress["state"], f"at step {progress['step']} of {steps}"
    if state == "complete" and progress["step"] >= steps:
        return ""
    states = {
        "failed": f"failed {at}: {progress.get('message')}",
        "stopped": f"stopped by {progress.get('signal')} {at}",
    }
    return states.get(state, f"{state} {at}, or ended without a message")


def after_trunk(record: Record, planned: PlannedRun, trunk: Record | None) -> Record | None:
    """Return a record with its trunk's steps and validations before its own.

    A trunk is the longer run from whose checkpoint a fork starts (see `planned_runs`). A record
    that is no fork is returned unchanged; a fork without ``trunk`` gives None. Raises ConfigError
    (the fork's start differs from the study's plan).
    """
    fork = record.config.checkpoint.fork
    if fork is None:
        return record
    if begins_at(fork) != (planned.trunk, planned.begin_step):
        wanted = "no fork"
        if planned.trunk:
            wanted = f"it to begin at step {planned.begin_step} of {planned.trunk}"
        raise ConfigError(
            f"{record.place}: it began at {fork}, but the study now plans {wanted}; move the run"
            " away and run it again"
        )
    if trunk is None:
        return None
    steps = [step for step in trunk.steps if step.step <= planned.begin_step]
    losses = [entry for entry in trunk.validations if entry[0] <= planned.begin_step]
    return replace(
        record, steps=(*steps, *record.steps), validations=(*losses, *record.validations)
    )


def read_export(path: Path) -> dict[str, Record]:
    """Return run name -> record of a JSON-lines export with one line per run, {"name", "config",
    "history"}, as docs/scaling.md creates it.

    The logger writes every ``log.interval`` steps, so training losses and seconds are means over
    these steps. Raises ConfigError (a line is not such an object, lacks a key, or a run occurs
    twice), StorageError.
    """
    records: dict[str, Record] = {}
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            record = _exported(f"{path}: line {number}", line)
            if record.config.name in records:
                raise ConfigError(
                    f"{record.place}: the run is listed twice, see"
                    f" {records[record.config.name].place}; keep one of the lines"
                )
            records[record.config.name] = record
    return records


def _exported(where: str, line: str) -> Record:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{where}: not JSON ({error}); docs/scaling.md describes the export"
        ) from None
    for key, kind in (("name", str), ("config", dict), ("history", list)):
        if not isinstance(raw, dict) or not isinstance(raw.get(key), kind):
            raise ConfigError(f"{where}: {key} is missing; docs/scaling.md describes the export")
    place = f"{where}: run {raw['name']}"
    values = {key: value for key, value in raw["config"].items() if not key.startswith("_")}
    try:
        config = run_of(values, Path("config"))
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    if config.model.vocab_size is None or not values.get("name"):
        absent = "name" if not values.get("name") else "model.vocab_size"
        raise ConfigError(
            f"{place}: config: {absent} is missing: it is not the configuration that pretrain logs"
        )
    merged = dict[int, dict[str, Any]]()
    # The rows are in the order of logging: for a repeated step the last values count.
    for row in _rows(place, raw["history"]):
        merged.setdefault(row["step"], {}).update(row)
    rows = [merged[step] for step in sorted(merged)]
    nowhere = [key for key in EXPORTED_KEYS if not any(key in row for row in rows)]
    if nowhere:
        raise ConfigError(
            f"{place}: history: no row has {', '.join(nowhere)}; export the rows with"
            f" {', '.join(EXPORTED_KEYS)}"
        )
    steps = []
    _, before = begins_at(config.checkpoint.fork)
    for row in rows:
        if "loss" in row and "step_seconds" in row:
            steps.append(
                Step(row["step"], row["loss"], row["step_seconds"] * (row["step"] - before))
            )
            before = row["step"]
    validations = tuple((row["step"], row["valid_loss"]) for row in rows if "valid_loss" in row)
    last = validations[-1][0] if validations else 0
    wanted = Schedule.of(config).steps
    unfinished = "" if last == wanted else f"its last validation is of step {last} of {wanted}"
    return Record(place, "wandb", config, tuple(steps), validations, unfinished)


def _rows(place: str, history: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the numbers of the rows: Weights & Biases writes non-finite values as text, and null
    for absent values.
    """
    for number, row in enumerate(history):
        # "_step" is used by runs without a separate metric for the step.
        if isinstance(row, dict) and "_step" in row:
            row = {"step": row["_step"], **row}
        if not isinstance(row, dict) or "step" not in row:
            raise ConfigError(
                f"{place}: history.{number}: step is missing; export the rows with"
                f" {', '.join(EXPORTED_KEYS)}"
            )
        try:
            numbers = {key: float(row[key]) for key in EXPORTED_KEYS if row.get(key) is not None}
        except (TypeError, ValueError):
            raise ConfigError(
                f"{place}: history.{number}: {', '.join(EXPORTED_KEYS)} are not all numbers"
            ) from None
        yield {**numbers, "step": int(numbers["step"])}


def table_rows(record: Record, planned: PlannedRun, data: DataIdentity) -> list[dict[str, object]]:
    """Return the table's rows of a run, one per validation with a finite loss.

    The last row of a complete run has ``final`` set.
    """
    config, schedule = record.config, Schedule.of(record.config)
    per_token = flops_per_token(config)
    same: dict[str, object] = {
        "run": planned.name,
        "variant": planned.variant,
        "seed": config.train.seed,
        "budget": planned.budget,
        "width": config.model.hidden_size,
        "layers": config.model.num_layers,
        "heads": config.model.num_attention_heads,
        "parametrization": config.model.parametrization,
        "parameters": total_parameters(config.model),
        "non_embedding_parameters": non_embedding_parameters(config.model),
        "flops_per_token": per_token,
        "batch_tokens": schedule.step_tokens,
        "learning_rate": config.optimizer.lr,
        "steps": schedule.steps,
        "data": data.key,
        "tokenizer": data.tokenizer[:16],
        "config_hash": config_hash(config, data),
        "source": record.source,
    }
    rows = []
    before = 0
    for step, loss in record.validations:
        if not math.isfinite(loss):
            continue
        tokens = step * schedule.step_tokens
        losses = [
            entry.loss
            for entry in record.steps
            if before < entry.step <= step and math.isfinite(entry.loss)
        ]
        seconds = sum(entry.seconds for entry in record.steps if entry.step <= step)
        of_this = {
            "step": step,
            "tokens": tokens,
            "flops": tokens * per_token,
            "loss": loss,
            "train_loss": sum(losses) / len(losses) if losses else math.nan,
            "wall_seconds": seconds,
            "final": not record.unfinished and step == schedule.steps,
        }
        rows.append(same | of_this)
        before = step
    return rows
