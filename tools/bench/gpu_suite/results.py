"""Record of the outcomes on disk, and the ratios, targets and tables that are computed from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fem_common.files import append_json_line
from kernels.fem_attention.engines import ENGINES
from kernels.fem_attention.table import Entry
from pretrain.plan.devices import peak_tflops
from tools.bench.engines.figures import Figures
from tools.bench.gpu_suite.plan import FIRST, LENGTHS, TOKENS_A_CALL, Task
from tools.bench.speed import Speed
from tools.bench.whole_model import BASELINE, PACKED, StepCost
from tools.bench.workloads import BASELINES, WORKLOADS, Size

FILE = "outcomes.jsonl"
OUT_OF_MEMORY = "out of memory"
CHECKS = ("correctness", "train", "sanitize")  # kinds of task that must not fail


@dataclass(frozen=True)
class Outcome:
    """Outcome of a task.

    result: the worker's result; None if it is missing.
    gap: reason why the result is missing; None if it exists.
    seconds: duration of the task.
    """

    task: Task
    result: Any = None
    gap: str | None = None
    seconds: float = 0.0

    @property
    def refused(self) -> bool:
        """True if the implementation does not support the checked or timed case."""
        return self.gap is not None and "ValueError" in self.gap and "cannot run:" in self.gap

    @property
    def failed(self) -> bool:
        """True if a check or throughput run ended in an error.

        Lack of memory and unsupported cases are not errors.
        """
        wanted = self.task.kind in CHECKS or self.task.part == "throughput"
        return wanted and self.gap is not None and not self.refused and self.gap != OUT_OF_MEMORY

    @property
    def wrong(self) -> bool:
        """True if a check's result is out of its bounds."""
        if self.gap is not None or self.task.kind not in CHECKS:
            return False
        if self.task.kind == "train":
            return not self.result["good"]
        reported = self.result["reported"] if self.task.kind == "sanitize" else []
        return bool(reported) or not all(finding["good"] for finding in self.findings)

    @property
    def settled(self) -> bool:
        """True if the task need not be performed again."""
        return self.refused or (self.gap is None and not self.wrong)

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Results of a check of an operation, with the operation, implementation and dtype of each.

        Each contains "error", which is infinity if the JSON contains null (not finite).
        """
        if self.gap is not None or self.task.kind not in ("correctness", "sanitize"):
            return []
        requested = {key: self.task.arguments[key] for key in ("op", "implementation", "dtype")}
        found = self.result["checked"] or [] if self.task.kind == "sanitize" else self.result
        return [
            {**requested, **each, "error": math.inf if each["error"] is None else each["error"]}
            for each in found
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the outcome and its task as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Outcome:
        """Restore an outcome from JSON values. Raises KeyError, TypeError if they are invalid."""
        return cls(Task(**values["task"]), values["result"], values["gap"], values["seconds"])


@dataclass
class Record:
    """Contents of the file outcomes.jsonl in ``folder``.

    The file has a line for each start of the suite (session), and a line for each outcome, written
    immediately.

    sessions: {"machine", "minutes", "dry", "planned": names of the tasks, "cannot": name ->
        reason}, in the order of the starts.
    outcomes: task name -> outcome; the last outcome of a task counts.
    damaged: number of unreadable lines, for example the last line of a killed process.
    """

    folder: Path
    sessions: list[dict[str, Any]] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    damaged: int = 0

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Read the folder's record, which may be empty."""
        record = cls(folder)
        path = folder / FILE
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            try:
                values = json.loads(line)
                if "session" in values:
                    record.sessions.append(values["session"])
                else:
                    outcome = Outcome.from_json(values)
                    record.outcomes[outcome.task.name] = outcome
            except (ValueError, KeyError, TypeError):
                record.damaged += 1
        return record

    def begin(self, session: dict[str, Any]) -> None:
        """Record a start of the suite."""
        self.sessions.append(session)
        append_json_line(self.folder / FILE, {"session": session})

    def add(self, outcome: Outcome) -> None:
        """Record an outcome."""
        self.outcomes[outcome.task.name] = outcome
        append_json_line(self.folder / FILE, outcome.as_json())

    @property
    def cannot(self) -> dict[str, str]:
        """Implementations and baselines that the machine could not run: name -> reason."""
        return {name: why for session in self.sessions for name, why in session["cannot"].items()}

    @property
    def left_out(self) -> list[str]:
        """Names of the planned tasks that have no outcome."""
        planned = dict.fromkeys(name for session in self.sessions for name in session["planned"])
        return [name for name in planned if name not in self.outcomes]

    def missing(self, planned: Iterable[Task]) -> list[Task]:
        """Return the tasks to perform, in which repeated tasks come last.

        If one trainer run of a unit is repeated, all runs of the unit are, at the place of the
        unit.
        """
        planned = list(planned)
        settled = {name for name, outcome in self.outcomes.items() if outcome.settled}
        units = {
            task.unit
            for task in planned
            if task.kind == "train" and task.unit and task.name not in settled
        }
        wanted = [
            task
            for task in planned
            if task.name not in settled or (task.kind == "train" and task.unit in units)
        ]

        def failed_alone(task: Task) -> bool:
            return task.name in self.outcomes and task.unit not in units

        return sorted(wanted, key=failed_alone)


@dataclass(frozen=True)
class Target:
    """Performance target of the project.

    bound: least value if ``at_least`` is set, else the greatest value.
    value: measured value; None if it was not measured.
    """

    what: str
    bound: float
    value: float | None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """True if the target is met; None if it was not measured."""
        if self.value is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound


class Results:
    """Results of a set of outcomes, grouped by kind."""

    def __init__(self, outcomes: Iterable[Outcome], device_name: str) -> None:
        self.outcomes, self.device_name = list(outcomes), device_name
        # (workload, implementation, tokens) -> speed
        self.ops: dict[tuple[str, str, int], Speed] = {}
        # (baseline, size) -> speed
        self.baselines: dict[tuple[str, Size], Speed] = {}
        # (scale, variant, recompute) -> cost
        self.models: dict[tuple[str, str, bool], StepCost] = {}
        self.engines: dict[str, Figures] = {}
        self.throughput: dict[str, Figures] = {}  # name of the model -> figures
        self.roofs: dict[str, float] | None = None
        for outcome in self.outcomes:
            if outcome.gap is None:
                self._take(outcome.task, outcome.result)
        self.findings = []
        for outcome in self.outcomes:
            if outcome.task.kind == "correctness":
                self.findings += outcome.findings

    def _take(self, task: Task, result: Any) -> None:
        requested = task.arguments
        if task.kind == "op":
            workload, implementation = requested["workload"], requested["implementation"]
            tokens = requested["size"]["tokens"]
            self.ops[workload, implementation, tokens] = Speed.from_json(result)
        elif task.kind == "baseline":
            size = Size(**requested["size"])
            self.baselines[requested["baseline"], size] = Speed.from_json(result)
        elif task.kind == "model":
            cost = StepCost.from_json(result)
            self.models[requested["scale"], requested["variant"], requested["recompute"]] = cost
        elif task.kind == "engine" and task.part == "throughput":
            self.throughput[requested["model"]] = Figures(**result)
        elif task.kind == "engine":
            self.engines[requested["variant"]] = Figures(**result)
        elif task.kind == "roofs":
            self.roofs = result

    def of_kind(self, kind: str) -> list[Outcome]:
        """Return the outcomes of tasks of the kind ``kind``."""
        return [outcome for outcome in self.outcomes if outcome.task.kind == kind]

    @property
    def wrong(self) -> list[Outcome]:
        """Checks whose result is out of bounds."""
        return [outcome for outcome in self.outcomes if outcome.wrong]

    @property
    def failed(self) -> list[Outcome]:
        """Checks and throughput runs that ended in an error."""
        return [outcome for outcome in self.outcomes if outcome.failed]

    def against(self, workload: str, tokens: int) -> dict[str, Speed]:
        """Return the measured baselines of a workload at a sequence length: name -> costs."""
        size = WORKLOADS[workload].size(tokens, TOKENS_A_CALL)
        keys = {name: (name, sized(size)) for name, sized in WORKLOADS[workload].baselines.items()}
        return {name: self.baselines[key] for name, key in keys.items() if key in self.baselines}

    def best(self, workload: str, tokens: int) -> tuple[str, Speed] | None:
        """Return (name, costs) of the baseline with the fastest forward + backward, or None."""
        found = self.against(workload, tokens)
        return min(found.items(), key=lambda item: item[1].both.seconds) if found else None

    def ratio(self, workload: str, implementation: str, tokens: int) -> tuple[float, float] | None:
        """Return the time ratios (forward, forward + backward) to the fastest baseline.

        Return None if the implementation or all baselines were not measured.
        """
        own = self.ops.get((workload, implementation, tokens))
        best = self.best(workload, tokens)
        return None if own is None or best is None else own.ratios(best[1])

    def same_engine(self, workload: str, tokens: int) -> Iterator[tuple[str, float, Speed]]:
        """Yield (engine, ratio, costs of the workload) for the workload's attention engines.

        The ratio is the time of forward + backward, divided by that of standard attention by the
        same engine. Engines by which only one of the two was timed are left out.
        """
        for name, side in self.against(workload, tokens).items():
            engine = BASELINES[name].engine
            own = None if engine is None else self.ops.get((workload, engine, tokens))
            if engine is not None and own is not None:
                yield engine, own.ratios(side)[1], own

    def fastest_engine_ratio(self, workload: str, tokens: int) -> float | None:
        """Return the ratio of `same_engine` for the workload's fastest engine.

        Return None if no engine was timed.
        """
        found = list(self.same_engine(workload, tokens))
        return min(found, key=lambda each: each[2].both.seconds)[1] if found else None

    def model_ratio(
        self, scale: str, variant: str, *, recompute: bool = False, base: str = BASELINE
    ) -> float | None:
        """Return the time of a model's training step relative to the model ``base``, per token.

        Return None if one of them was not measured.
        """
        return self._per_token((scale, variant, recompute), (scale, base, recompute))

    def packed_ratio(self, scale: str, variant: str) -> float | None:
        """Return the step time with separate documents relative to joined documents, per token.

        Separate documents do not attend to each other. Return None if one of the two was not
        measured.
        """
        if scale not in PACKED:
            return None
        return self._per_token((scale, variant, False), (PACKED[scale], variant, False))

    def _per_token(self, model: tuple[str, str, bool], base: tuple[str, str, bool]) -> float | None:
        own, other = self.models.get(model), self.models.get(base)
        if own is None or other is None:
            return None
        return other.tokens_per_second / own.tokens_per_second

    def utilisation(self, scale: str, variant: str, *, recompute: bool = False) -> float | None:
        """Return the model's MFU, or None if the model or the device's peak is unknown.

        The peak is that of the data sheet if the device is known, else the measured one.
        """
        found = self.models.get((scale, variant, recompute))
        listed = peak_tflops(self.device_name)
        peak = listed * 1e12 if listed else (self.roofs or {}).get("matmul_flops")
        return found.utilisation(peak) if found and peak else None

    def targets(self) -> list[Target]:
        """Return all targets, the most important first."""
        fem, gla = "FEM-SM, C L T G", "FEM-GLA's read"
        return [
            *(
                Target(
                    "FEM-SM's attention ÷ standard, the same engine, forward + backward, "
                    f"{tokens} tokens",
                    bound,
                    self.fastest_engine_ratio(FIRST, tokens),
                )
                for tokens, bound in ((4096, 1.15), (8192, 1.08))
            ),
            Target(
                "FEM-SM with C L T G ÷ Transformer, training step, 1.3B at 4096",
                1.10,
                self.model_ratio("1.3B", fem),
            ),
            Target(
                "FEM-GLA's read ÷ GLA's, the same engine, forward + backward, 4096 tokens",
                1.10,
                self._gla_ratio(gla),
            ),
            Target(
                "FEM-GLA with C L T G ÷ GLA, training step, 1.3B at 4096",
                1.10,
                self.model_ratio("1.3B", "FEM-GLA, C L T G", base="GLA"),
            ),
            Target(
                "FEM-SM ÷ Transformer, the trainer's step, 1.3B at 4096",
                1.10,
                self._trainer_ratio("1.3b"),
            ),
            *(
                Target(f"MFU of the trainer, {name}", 0.41, self._trainer_mfu(name), at_least=True)
                for name in ("transformer_1.3b", "fem_sm_1.3b")
            ),
            Target(
                "MFU of the 1.3B Transformer",
                0.45,
                self.utilisation("1.3B", BASELINE),
                at_least=True,
            ),
            Target("MFU of the 1.3B FEM-SM", 0.45, self.utilisation("1.3B", fem), at_least=True),
        ]

    def _trainer_ratio(self, scale: str) -> float | None:
        """Return the time per token of FEM-SM's training run relative to the Transformer's.

        Return None if one of them was not measured.
        """
        fem = self.throughput.get(f"fem_sm_{scale}")
        base = self.throughput.get(f"transformer_{scale}")
        if fem is None or base is None:
            return None
        return (fem.step / fem.tokens) / (base.step / base.tokens)

    def _trainer_mfu(self, name: str) -> float | None:
        return self.throughput[name].mfu if name in self.throughput else None

    def _gla_ratio(self, workload: str) -> float | None:
        return next((ratio for _, ratio, _ in self.same_engine(workload, 4096)), None)

    def lengths(self, workload: str, implementation: str) -> list[int]:
        """Return the lengths at which an implementation was timed."""
        return [tokens for tokens in LENGTHS if (workload, implementation, tokens) in self.ops]

    def engine_table(self) -> list[Entry]:
        """Return the table from which ``kernels.fem_attention`` selects the attention engine.

        Each entry contains the microseconds of forward + backward of FEM's attention by each
        engine.
        """
        entries = []
        for name, workload in WORKLOADS.items():
            if workload.op != "fem_attention":
                continue
            for tokens in LENGTHS:
                sides = {engine: self.ops.get((name, engine, tokens)) for engine in ENGINES}
                times = {
                    engine: round(1e6 * side.both.seconds, 1)
                    for engine, side in sides.items()
                    if side is not None
                }
                if times:
                    entries.append(
                        Entry("bfloat16", workload.key, workload.value, tokens, True, times)
                    )
        return entries
