"""Run an evaluation: run every task that has no result for every model, write each result file when
it is complete, and report progress.

Existing results are not computed again. A failed task is reported at the end and does not stop the
others.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from fem_common.errors import CommandError, ConfigError, StorageError
from fem_common.progress import Progress

from . import results
from .catalogue import Tasks
from .harness import Answers, NotANumber
from .perplexity import data_digest
from .results import Settings
from .suite import Suite, SuiteTask

CPU_BATCH = 8


@dataclass(frozen=True)
class Model:
    """Model to evaluate. name: name in the table. key: fingerprint of its weights."""

    name: str
    path: Path
    key: str


@dataclass(frozen=True)
class Job:
    """One run of a task for a model. columns: the columns of the table that use its scores."""

    model: Model
    columns: tuple[SuiteTask, ...]
    settings: dict[str, Any]

    @property
    def title(self) -> str:
        """Title of the job in messages."""
        return f"{self.model.name} {self.columns[0].task}"


@dataclass(frozen=True)
class Plan:
    """Jobs that must run, in the order of the models. done: number of jobs that have results."""

    jobs: tuple[Job, ...]
    done: int


def plan(
    suite: Suite,
    models: list[Model],
    out: Path,
    settings: Settings,
    tasks: Tasks | None,
    retry: bool,
) -> Plan:
    """Return the jobs of the suite that have no valid result yet.

    retry: run a job again if its existing result does not fit; False: raise ConfigError.

    Raises:
        ConfigError: an existing result is of another model, suite or setting.
    """
    jobs = []
    complaints = []
    done = 0
    for model in models:
        for columns in grouped_columns(suite):
            if columns[0].kind == "heldout":
                digest = data_digest(model.path, columns[0])
            else:
                digest = tasks.digest(columns[0].task) if tasks is not None else None
            wanted = settings.of(columns[0], digest)
            found = [
                results.fitting(out, model.name, model.key, column, wanted) for column in columns
            ]
            complaints += [complaint for complaint in found if complaint]
            if all(complaint == "" for complaint in found):
                done += 1
            else:
                jobs.append(Job(model, columns, wanted))
    if complaints and not retry:
        more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
        raise ConfigError(
            f"{complaints[0]}{more}: --retry evaluates again and replaces it, --out sets another"
            " folder, NAME=MODEL another name"
        )
    return Plan(tuple(jobs), done)


def grouped_columns(suite: Suite) -> list[tuple[SuiteTask, ...]]:
    """Return the columns in groups that one run of a task serves, in the order of the suite.

    Columns share a run if task and few-shot count are equal. Held-out columns are not grouped.
    """
    groups: dict[Any, list[SuiteTask]] = {}
    for column in suite.tasks:
        key = column.name if column.kind == "heldout" else (column.task, column.fewshot)
        groups.setdefault(key, []).append(column)
    return [tuple(columns) for columns in groups.values()]


@dataclass
class Runner:
    """Runs the jobs of a plan.

    failed: messages of failures. skipped: messages of tasks that this machine cannot run. The other
    fields are options of the command line.
    """

    out: Path
    tasks: Tasks | None
    settings: Settings
    device: str
    tokenizer: Path | None
    batch_size: int | None
    stream: TextIO
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    _opened: Any = None
    _adaptor: Any = None

    def run(self, plan: Plan) -> None:
        """Run all jobs; a model that cannot be opened does not stop the others.

        Raises:
            ConfigError: no model could be opened.
            StorageError: a result cannot be written.
        """
        wrong: dict[str, ValueError] = {}
        last: Model | None = None
        for number, job in enumerate(plan.jobs, plan.done + 1):
            if job.model is not last:
                last = job.model
                try:
                    self._open(job.model)
                except ValueError as error:  # ConfigError
                    wrong[job.model.name] = error
                    self.failed.append(f"{job.model.name}: {error}")
            if job.model.name not in wrong:
                self._one(job, f"[{number}/{plan.done + len(plan.jobs)}]")
        if wrong and len(wrong) == len({job.model.name for job in plan.jobs}):
            raise next(iter(wrong.values()))

    def _open(self, model: Model) -> None:
        import torch

        from tools.hf.open_model import open_model

        # Free the memory of the previous model before the next one is loaded.
        self._opened = self._adaptor = None
        dtype = None if self.settings.dtype is None else getattr(torch, self.settings.dtype)
        opened = open_model(model.path, dtype=dtype, device=self.device, tokenizer=self.tokenizer)
        self._opened = replace(opened, name=model.name)
        self._log(
            f"{model.name}: {opened.kind} {opened.source},"
            f" {str(opened.dtype).removeprefix('torch.')} on {opened.model.device.type}"
        )

    def _one(self, job: Job, count: str) -> None:
        started = time.monotonic()
        trace = self.out / job.model.name / f".{job.columns[0].name}.failed.txt"
        try:
            heldout = job.columns[0].kind == "heldout"
            contents = self._heldout(job) if heldout else self._harness(job, count)
        except (StorageError, KeyboardInterrupt):
            raise
        # The task's code and the libraries raise errors of any class; the other tasks still run.
        except Exception as error:
            said, where = " ".join(str(error).split())[:300] or "no message", ""
            if not isinstance(error, CommandError | NotANumber):
                said, where = f"{type(error).__name__}: {said}", f" ({trace})"
                trace.parent.mkdir(parents=True, exist_ok=True)
                trace.write_text(traceback.format_exc(), encoding="utf-8")
            self.failed.append(f"{job.title}: {said}{where}")
            self._log(f"{count} {job.title}: FAILED: {said}")
            return
        trace.unlink(missing_ok=True)
        for column, content in zip(job.columns, contents, strict=False):
            content |= {
                "model": job.model.name,
                "model_key": job.model.key,
                "settings": job.settings,
                "seconds": round(time.monotonic() - started, 3),
            }
            results.write(self.out, job.model.name, column, content)
            error_bar = "" if content["stderr"] is None else f" ± {content['stderr']:.4f}"
            self._log(
                f"{count} {job.model.name} {column.label}: {column.metric}"
                f" {content['value']:.4f}{error_bar}{_cut(content)}"
            )
        if not heldout:
            self._answers(job).remove()

    def _answers(self, job: Job, count: str = "") -> Answers:
        """Return the store of a job's answers, a hidden file next to its results.

        count: the number of the job, shown with the progress.
        """
        file = self.out / job.model.name / ".answers" / f"{job.columns[0].name}.jsonl"
        progress = Progress(0, "requests", f"{count} {job.title}", stream=self.stream)
        return Answers(file, {"model_key": job.model.key, **job.settings}, progress)

    def _harness(self, job: Job, count: str) -> list[dict[str, Any]]:
        from .harness import Adaptor, ask

        assert self.tasks is not None
        if self._adaptor is None:
            small = self._opened.model.device.type == "cpu"
            self._adaptor = Adaptor(
                self._opened,
                self.batch_size or (CPU_BATCH if small else "auto"),
                self.settings.max_length,
            )
        with self._answers(job, count) as answers, answers.progress:
            self._adaptor.keep_in(answers)
            limit, seed = self.settings.limit, self.settings.seed
            requested = ask(self._adaptor, self.tasks, job.columns[0], limit, seed)
        return [results.harness_result(column, requested) for column in job.columns]

    def _heldout(self, job: Job) -> list[dict[str, Any]]:
        from .perplexity import heldout_data, heldout_result

        (column,) = job.columns
        if column.data is None:
            why = ""
            try:
                for prefix in heldout_data(self._opened.manifest, self._opened.name):
                    if not prefix.with_name(f"{prefix.name}.idx").is_file():
                        why = why or f"the validation data of its run, {prefix}, does not exist"
            except ConfigError as error:
                why = str(error)
            if why:
                self.skipped.append(f"{job.title}: {why}")
                return []
        folder, size = self.out / job.model.name, self.batch_size
        return [
            heldout_result(
                self._opened, column, folder, job.model.key, batch_size=size, stream=self.stream
            )
        ]

    def _log(self, line: str) -> None:
        self.stream.write(f"{line}\n")
        self.stream.flush()


def _cut(content: dict[str, Any]) -> str:
    """Return a note on the prompts of a result that were too long; empty if all fitted."""
    cut = content.get("truncated")
    if not cut:
        return ""
    return (
        f" ({cut} of {content['requests']} prompts were longer than the context and were cut at the"
        " beginning)"
    )
