"""Outcomes as numbers that can be asked for: ratios to what an operation is held against, shares of the roofs, the targets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kernels.fem_attention.engines import ENGINES
from kernels.fem_attention.table import Entry
from pretrain.plan.devices import peak_tflops
from tools.bench.engines.figures import Figures
from tools.bench.gpu_suite.plan import FIRST, LENGTHS, TOKENS_A_CALL
from tools.bench.gpu_suite.pool import Outcome
from tools.bench.whole_model import BASELINE, PACKED
from tools.bench.workloads import BASELINES, WORKLOADS, Size


@dataclass(frozen=True)
class Side:
    """Seconds of forward and of forward + backward; spread: the larger of the two; and its matrix FLOPs and bytes of both passes."""

    forward: float
    both: float
    spread: float
    flops: float
    bytes: float

    @classmethod
    def of(cls, result: dict[str, Any]) -> Side:
        """From a worker's answer."""
        forward, both = result["forward"], result["both"]
        return cls(forward["seconds"], both["seconds"], max(forward["spread"], both["spread"]), result["flops"][1], result["bytes"][1])


@dataclass(frozen=True)
class Target:
    """A number that the project has set itself: at most ``bound``, or at least; value None: not measured."""

    what: str
    bound: float
    value: float | None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether it is met; None where nothing was measured."""
        if self.value is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound


class Results:
    """What the outcomes of one run say."""

    def __init__(self, outcomes: list[Outcome], device_name: str) -> None:
        self.outcomes, self.device_name = outcomes, device_name
        self.ops: dict[tuple[str, str, int], Side] = {}
        self.baselines: dict[tuple[str, Size], Side] = {}
        self.models: dict[tuple[str, str, bool], dict[str, Any]] = {}
        self.engines: dict[str, Figures] = {}
        self.findings: list[dict[str, Any]] = []
        self.roofs: dict[str, float] | None = None
        for outcome in outcomes:
            if outcome.gap is None:
                self._take(outcome.task.kind, outcome.task.arguments, outcome.result)

    def _take(self, kind: str, asked: dict[str, Any], result: Any) -> None:
        if kind == "op":
            self.ops[asked["workload"], asked["implementation"], asked["size"]["tokens"]] = Side.of(result)
        elif kind == "baseline":
            self.baselines[asked["baseline"], Size(**asked["size"])] = Side.of(result)
        elif kind == "model":
            self.models[asked["scale"], asked["variant"], asked["recompute"]] = result
        elif kind == "engine":
            self.engines[asked["variant"]] = Figures(**result)
        elif kind == "roofs":
            self.roofs = result
        elif kind == "correctness":
            keys = ("op", "implementation", "dtype")
            self.findings += [{**{key: asked[key] for key in keys}, **finding} for finding in result]

    @property
    def wrong(self) -> list[dict[str, Any]]:
        """Findings out of bounds."""
        return [finding for finding in self.findings if not finding["good"]]

    @property
    def failed(self) -> list[Outcome]:
        """Cases whose call ended in an error that is not the machine's or the shape's: an implementation may say that one is not for it."""
        ended = [(outcome, outcome.gap) for outcome in self.outcomes if outcome.task.kind == "correctness" and outcome.gap is not None]
        return [outcome for outcome, gap in ended if gap != "out of memory" and not ("ValueError" in gap and "cannot run:" in gap)]

    def against(self, workload: str, tokens: int) -> dict[str, Side]:
        """What a workload is held against at a length, by name, as far as it was measured."""
        size = WORKLOADS[workload].size(tokens, TOKENS_A_CALL)
        keys = {name: (name, sized(size)) for name, sized in WORKLOADS[workload].baselines.items()}
        return {name: self.baselines[key] for name, key in keys.items() if key in self.baselines}

    def best(self, workload: str, tokens: int) -> tuple[str, Side] | None:
        """The fastest of them, forward + backward."""
        found = self.against(workload, tokens)
        return min(found.items(), key=lambda item: item[1].both) if found else None

    def ratio(self, workload: str, implementation: str, tokens: int) -> tuple[float, float] | None:
        """Forward, and forward + backward, over the fastest of what it is held against."""
        own, best = self.ops.get((workload, implementation, tokens)), self.best(workload, tokens)
        return None if own is None or best is None else (own.forward / best[1].forward, own.both / best[1].both)

    def same_engine(self, workload: str, tokens: int) -> Iterator[tuple[str, float, Side]]:
        """Implementation, forward + backward over standard attention by the same engine, and ours: for each engine that both have."""
        for name, side in self.against(workload, tokens).items():
            engine = BASELINES[name].engine
            own = None if engine is None else self.ops.get((workload, engine, tokens))
            if engine is not None and own is not None:
                yield engine, own.both / side.both, own

    def fastest_engine_ratio(self, workload: str, tokens: int) -> float | None:
        """Of the engines that both sides have, the ratio of that with which ours is fastest."""
        found = list(self.same_engine(workload, tokens))
        return min(found, key=lambda each: each[2].both)[1] if found else None

    def model_ratio(self, scale: str, variant: str, *, recompute: bool = False, base: str = BASELINE) -> float | None:
        """A model's training step over the Transformer's, both for each token."""
        return self._per_token((scale, variant, recompute), (scale, base, recompute))

    def packed_ratio(self, scale: str, variant: str) -> float | None:
        """A training step on documents read apart over one on joined ones, both for each token."""
        return self._per_token((scale, variant, False), (PACKED[scale], variant, False)) if scale in PACKED else None

    def _per_token(self, model: tuple[str, str, bool], base: tuple[str, str, bool]) -> float | None:
        own, other = self.models.get(model), self.models.get(base)
        if own is None or other is None:
            return None
        ratio: float = (own["step"]["seconds"] / own["tokens"]) / (other["step"]["seconds"] / other["tokens"])
        return ratio

    def utilisation(self, scale: str, variant: str, *, recompute: bool = False) -> float | None:
        """MFU, of the data sheet's peak where the device is known, else of the measured one."""
        found, listed = self.models.get((scale, variant, recompute)), peak_tflops(self.device_name)
        peak = listed * 1e12 if listed else (self.roofs or {}).get("matmul_flops")
        if found is None or not peak:
            return None
        share: float = found["flops"] / found["step"]["seconds"] / peak
        return share

    def targets(self) -> list[Target]:
        """All of them, in the order of their importance."""
        fem, gla = "FEM-SM, C L T G", "FEM-GLA's read"
        return [
            *(
                Target(f"FEM-SM's attention ÷ standard, the same engine, forward + backward, {tokens} tokens", bound, value)
                for tokens, bound, value in ((n, b, self.fastest_engine_ratio(FIRST, n)) for n, b in ((4096, 1.15), (8192, 1.08)))
            ),
            Target("FEM-SM with C L T G ÷ Transformer, training step, 1.3B at 4096", 1.10, self.model_ratio("1.3B", fem)),
            Target("FEM-GLA's read ÷ GLA's, the same engine, forward + backward, 4096 tokens", 1.10, self._gla_ratio(gla)),
            Target(
                "FEM-GLA with C L T G ÷ GLA, training step, 1.3B at 4096",
                1.10,
                self.model_ratio("1.3B", "FEM-GLA, C L T G", base="GLA"),
            ),
            Target("MFU of the 1.3B Transformer", 0.45, self.utilisation("1.3B", BASELINE), at_least=True),
            Target("MFU of the 1.3B FEM-SM", 0.45, self.utilisation("1.3B", fem), at_least=True),
        ]

    def _gla_ratio(self, workload: str) -> float | None:
        return next((ratio for _, ratio, _ in self.same_engine(workload, 4096)), None)

    def lengths(self, workload: str, implementation: str) -> list[int]:
        """The lengths at which it was timed."""
        return [tokens for tokens in LENGTHS if (workload, implementation, tokens) in self.ops]

    def engine_table(self) -> list[Entry]:
        """Microseconds of forward + backward of FEM's attention by each engine, as ``kernels.fem_attention`` chooses by."""
        entries = []
        for name, workload in WORKLOADS.items():
            for tokens in LENGTHS if workload.op == "fem_attention" else ():
                sides = {engine: self.ops.get((name, engine, tokens)) for engine in ENGINES}
                times = {engine: round(1e6 * side.both, 1) for engine, side in sides.items() if side is not None}
                if times:
                    entries.append(Entry("bfloat16", workload.key, workload.value, tokens, True, times))
        return entries
