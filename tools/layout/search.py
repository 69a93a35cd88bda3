"""Search over the parallel layouts of a run on a given number of GPUs.

AXES lists the configuration keys that the search varies. The trainer's checks decide which values
can be combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

from fem_common.config import ConfigErrors
from fem_common.costs import StepTime
from pretrain.config import RunConfig
from pretrain.plan.devices import memory_gib
from pretrain.plan.run_plan import Plan, make_plan
from pretrain.plan.zero_memory import zero_name
from pretrain.validate import validate
from tools.layout.step import Machine, mfu, step_time


@dataclass(frozen=True)
class Axis:
    """Configuration key that the search varies.

    values(config, gpus): values to try.
    word(config): text for the key's value in a layout's name; empty if the value needs no mention.
    """

    key: str
    values: Callable[[RunConfig, int], Iterable[Any]]
    word: Callable[[RunConfig], str]

    @property
    def section(self) -> str:
        """Section of the configuration that contains the key."""
        return self.key.partition(".")[0]

    def of(self, config: RunConfig) -> Any:
        """Return the key's value in a run's configuration."""
        return getattr(getattr(config, self.section), self.key.partition(".")[2])


def _tensor(config: RunConfig) -> str:
    size = config.parallel.tensor_model_parallel_size
    return f"TP{size}+SP" if size > 1 else ""


def _pipeline(config: RunConfig) -> str:
    stages = config.parallel.pipeline_model_parallel_size
    chunks = config.parallel.virtual_pipeline_model_parallel_size
    if stages == 1:
        return ""
    return f"PP{stages}x{chunks}" if chunks else f"PP{stages}"


def _context(config: RunConfig) -> str:
    size = config.parallel.context_parallel_size
    kind = config.parallel.context_parallel_kind
    if size == 1:
        return ""
    return f"CP{size} {kind}" if kind else f"CP{size}"


def _zero(config: RunConfig) -> str:
    return f"ZeRO {zero_name(config.engine)}" if config.engine.name == "deepspeed" else ""


def _zero_stages(config: RunConfig, gpus: int) -> Iterable[Any]:
    return range(4) if config.engine.name == "deepspeed" else (config.engine.zero_stage,)


RECOMPUTE = {"none": "", "selective": "recompute selective", "full": "recompute"}

# Axes in the order in which they are set. After the last axis of a section, the checks that do not
# read a section of a later axis are run.
AXES = (
    Axis("parallel.tensor_model_parallel_size", lambda config, gpus: (1, 2, 4, 8), _tensor),
    Axis(
        "parallel.pipeline_model_parallel_size",
        lambda config, gpus: _divisors(config.model.num_layers),
        _pipeline,
    ),
    Axis(
        "parallel.virtual_pipeline_model_parallel_size",
        lambda config, gpus: (None, 2, 3, 4),
        lambda config: "",
    ),
    Axis(
        "parallel.context_parallel_size",
        lambda config, gpus: (2**n for n in range(gpus.bit_length())),
        _context,
    ),
    Axis("engine.zero_stage", _zero_stages, _zero),
    Axis(
        "train.micro_batch_size",
        lambda config, gpus: (1, 2, 4, 8, 16),
        lambda config: f"micro-batch {config.train.micro_batch_size}",
    ),
    Axis(
        "train.recompute",
        lambda config, gpus: ("none", "selective", "full"),
        lambda config: RECOMPUTE[config.train.recompute],
    ),
)


@dataclass(frozen=True)
class Candidate:
    """Layout that fits into memory.

    plan: plan of the run with this layout.
    time: modelled time of a step.
    """

    plan: Plan
    time: StepTime
    mfu: float

    @property
    def name(self) -> str:
        """Name of the layout in tables."""
        words = [axis.word(self.plan.config) for axis in AXES]
        first_of_engine = [axis.section for axis in AXES].index("engine")
        words.insert(first_of_engine, f"DP{self.plan.data_parallel}")
        return " ".join(filter(None, words))

    @property
    def extra_overrides(self) -> list[str]:
        """Overrides of the layout that do not belong into a file of ``configs/parallel``."""
        config = self.plan.config
        excluded = {"parallel"} if config.engine.name == "deepspeed" else {"parallel", "engine"}
        axes = [axis for axis in AXES if axis.section not in excluded]
        return [f"{axis.key}={axis.of(config)}" for axis in axes]

    @property
    def limit(self) -> str:
        """Category with the largest share of the step, and the share in percent.

        Matrix products and attention are left out.
        """
        seconds = self.time.seconds
        rest = [name for name in seconds if name not in ("products", "attention")]
        most = max(rest, key=lambda name: seconds[name])
        return f"{most} {100 * seconds[most] / self.time.total:.0f}%"


def layouts(config: RunConfig, gpus: int) -> Iterator[RunConfig]:
    """Yield the run's configuration with every layout that passes the run's own checks."""
    found = [config]
    unsettled = {axis.section for axis in AXES}
    for section, group in groupby(AXES, lambda axis: axis.section):
        axes = list(group)
        unsettled.discard(section)
        passed = []
        for each in found:
            for values in product(*(axis.values(config, gpus) for axis in axes)):
                made = _with(each, gpus, section, axes, values)
                if made is not None and _passes(made, gpus, unsettled):
                    passed.append(made)
        found = passed
    yield from found


def _with(
    config: RunConfig, gpus: int, section: str, axes: list[Axis], values: tuple[Any, ...]
) -> RunConfig | None:
    """Return the configuration with the ``axes`` of one section set to ``values``.

    Settings that follow from these values are set as well. Return None if the number of GPUs is not
    a multiple of the model-parallel size.
    """
    part = replace(
        getattr(config, section),
        **{axis.key.partition(".")[2]: value for axis, value in zip(axes, values, strict=True)},
    )
    if section == "parallel":
        if gpus % part.model_parallel:
            return None  # the checks would refuse it as well, but take longer
        kind = part.context_parallel_kind if part.context_parallel_size > 1 else None
        part = replace(
            part,
            world_size=gpus,
            sequence_parallel=part.tensor_model_parallel_size > 1,
            context_parallel_kind=kind,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=config.engine.name == "megatron",
        )
    return replace(config, **{section: part})


def _passes(config: RunConfig, gpus: int, unsettled: set[str]) -> bool:
    try:
        validate(config, gpus, but=unsettled)
    except ConfigErrors:
        return False
    return True


def ranked(config: RunConfig, gpus: int, machine: Machine) -> tuple[list[Candidate], int]:
    """Return (layouts that fit, the fastest first; number of layouts that need too much memory).

    Raises:
        ConfigErrors: the run's own checks reject every layout; the errors are those of the simplest
        layout.
    """
    usable_memory = (memory_gib(machine.name) or 0) * 2**30 * machine.room
    fit = list[Candidate]()
    over = 0
    for made in layouts(config, gpus):
        plan = make_plan(made, gpus)
        if plan.peak_memory > usable_memory:
            over += 1
            continue
        time = step_time(plan, machine)
        fit.append(Candidate(plan, time, mfu(plan, time.total, machine.name)))
    if not fit and not over:
        simplest = _with(
            config,
            gpus,
            "parallel",
            [axis for axis in AXES if axis.section == "parallel"],
            (1, 1, None, 1),
        )
        assert simplest is not None
        validate(replace(simplest, train=replace(config.train, micro_batch_size=1)), gpus)
    return sorted(fit, key=lambda each: each.time.total), over


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
