"""Order of the engines for a shape: the measured table, and a default without measurements.

table.json: device name -> entries {dtype, dk, dv, tokens, causal, microseconds: {engine: forward +
backward of one call}}. The benchmark measures and writes it, for calls without padding and
documents. FEM_KERNELS and the argument ``implementation`` override it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kernels import machine
from kernels.fem_attention.engines import Call

TABLE = Path(__file__).with_name("table.json")

# Default orders for shapes without measurements: on Hopper and later (sm_90, sm_100), and on
# earlier architectures.
HOPPER = (
    "cudnn",
    "flash_attn_3",
    "flash_attn_4",
    "flash",
    "flash_attn_2",
    "triton",
    "efficient",
    "sdpa",
)
OTHERS = (
    "flash",
    "flash_attn_2",
    "cudnn",
    "triton",
    "efficient",
    "sdpa",
    "flash_attn_3",
    "flash_attn_4",
)
# Engines that read documents directly precede those that need a mask of all pairs.
MASKED = (
    "flash_attn_3",
    "flash_attn_4",
    "flash_attn_2",
    "triton",
    "efficient",
    "cudnn",
    "sdpa",
    "flash",
)
FLOAT32 = (
    "triton",
    "efficient",
    "sdpa",
    "cudnn",
    "flash_attn_3",
    "flash_attn_4",
    "flash",
    "flash_attn_2",
)


@dataclass(frozen=True)
class Entry:
    """Measurement of one shape: v's width dv, ``tokens`` keys and as many queries.

    microseconds: time of forward + backward by engine.
    """

    dtype: str
    dk: int
    dv: int
    tokens: int
    causal: bool
    microseconds: Mapping[str, float]

    def __post_init__(self) -> None:
        if not (
            min(self.dk, self.dv, self.tokens) > 0
            and all(time > 0 for time in self.microseconds.values())
        ):
            raise ValueError(
                f"a shape or a time is not positive for dk {self.dk}, dv {self.dv}, "
                f"{self.tokens} tokens"
            )

    def far_from(self, call: Call) -> tuple[float, float]:
        """Return the distance to a call's shape in powers of two: (widths, tokens)."""
        widths = abs(math.log2(call.dk / self.dk)) + abs(math.log2(call.values / (2 * self.dv)))
        return widths, abs(math.log2(call.tk / self.tokens))


@functools.lru_cache(maxsize=4096)
def order(call: Call, path: Path = TABLE) -> tuple[str, ...]:
    """Return the engines' names in the order in which to try them.

    Raises ValueError for a table that cannot be read.
    """
    if call.dtype == torch.float32:
        usual = FLOAT32
    elif call.masked:
        usual = MASKED
    else:
        # sm_120 runs the kernels of an A100.
        usual = HOPPER if 90 <= machine.architecture(call.device) < 120 else OTHERS
    return (
        usual
        if call.masked
        else measured_order(call, read(path).get(machine.name(call.device), ()), usual)
    )


def measured_order(call: Call, entries: Iterable[Entry], usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return the engines measured at the nearest shape of the call's dtype and causality, the
    fastest first, then the rest as in ``usual``.
    """
    alike = [
        entry
        for entry in entries
        if entry.dtype == str(call.dtype).removeprefix("torch.") and entry.causal == call.causal
    ]
    if not alike:
        return usual
    times = min(alike, key=lambda entry: entry.far_from(call)).microseconds
    measured = sorted((name for name in usual if name in times), key=lambda name: times[name])
    return (*measured, *(name for name in usual if name not in times))


@functools.lru_cache(maxsize=8)
def read(path: Path = TABLE) -> dict[str, tuple[Entry, ...]]:
    """Return device name -> entries. Raises ValueError if the file does not have this form."""
    if not path.exists():  # the folder of an exported model contains code only
        return {}
    try:
        return {
            device: tuple(Entry(**one) for one in entries)
            for device, entries in json.loads(path.read_text(encoding="utf-8")).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path.name} is not a table of engines: {error}; write it again with the benchmark "
            f"or make it {{}}"
        ) from error


def write(device: str, entries: Iterable[Entry], path: Path = TABLE) -> None:
    """Write a device's entries into the table; they replace those of the same shapes."""
    tables = dict(read(path)) if path.exists() else {}
    kept = {
        (one.dtype, one.dk, one.dv, one.causal, one.tokens): one
        for one in (*tables.get(device, ()), *entries)
    }
    tables[device] = tuple(kept[shape] for shape in sorted(kept))
    listed = {
        name: ",\n".join("    " + json.dumps(asdict(entry), sort_keys=True) for entry in table)
        for name, table in sorted(tables.items())
    }
    body = ",\n".join(f"  {json.dumps(name)}: [\n{lines}\n  ]" for name, lines in listed.items())
    path.write_text("{\n" + body + "\n}\n", encoding="utf-8")
    read.cache_clear()
    order.cache_clear()
