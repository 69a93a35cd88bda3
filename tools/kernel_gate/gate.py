"""All builds of the kernels room through the compiler, in parallel, and the page that tells of them. No GPU is needed or looked for."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import kernels
from kernels.tiles import Build
from tools.kernel_gate.compile import ARCHITECTURES, SHARED_LIMIT, Report, report


@dataclass(frozen=True)
class Built:
    """A build, where it comes from, and its reports by architecture."""

    module: str
    build: Build
    reports: dict[int, Report]

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"{self.module}: {self.kernel}, {self.build.label}"

    @property
    def kernel(self) -> str:
        """The kernel's name without its leading underscore."""
        return str(self.build.kernel.fn.__name__).lstrip("_")

    def faults(self) -> list[str]:
        """What stands against it: anything on the first architecture; elsewhere only that it does not compile."""
        first, *others = (self.reports[arch] for arch in ARCHITECTURES if arch in self.reports)
        against = [f"sm_{first.arch}: {fault}" for fault in first.faults(self.build)]
        return against + [f"sm_{other.arch}: does not compile: {other.failed}" for other in others if other.failed]


def modules(prefix: str = "kernels") -> Iterator[str]:
    """Modules with builds, by name, under ``prefix``."""
    for module in sorted(found.name for found in pkgutil.walk_packages(kernels.__path__, "kernels.")):
        inside = module == prefix or module.startswith(prefix.rstrip(".") + ".")
        if inside and ".triton" in module and hasattr(importlib.import_module(module), "BUILDS"):
            yield module


def build_all(prefix: str, architectures: tuple[int, ...], told: Callable[[int, int, str], None]) -> list[Built]:
    """Every build under ``prefix``; told(done, of, name) after each. As many processes as there are cores."""
    listed = [(module, n) for module in modules(prefix) for n in range(len(_builds(module)))]
    reports: dict[tuple[str, int], dict[int, Report]] = {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(_reports, module, n, architectures): (module, n) for module, n in listed}
        for done, future in enumerate(as_completed(pending), start=1):
            module, n = pending[future]
            reports[module, n] = future.result()
            told(done, len(listed), f"{module}: {_builds(module)[n].label}")
    return [Built(module, _builds(module)[n], reports[module, n]) for module, n in listed]


def page(built: list[Built], triton_version: str) -> str:
    """docs/kernels.md."""
    lines = [
        "# The kernels' machine code",
        "",
        "Written by `python -m tools.kernel_gate --write`; a test compiles every kernel again and compares. Built without a GPU, by",
        f"Triton {triton_version} and its ptxas, at production shapes in the types that training uses. It says what a kernel takes, not",
        "how fast it is: speeds are in `docs/benchmarks/`.",
        "",
        "On sm_90 (H100, H200) every kernel is without spills and local memory, shared memory is within",
        f"{SHARED_LIMIT[90]} bytes, and ptxas warns of nothing that is not listed below. Where a third number stands, the count of wgmma",
        "instructions, all of the kernel's products are wgmma; kernels without it multiply little or tiles too small for it. For sm_80",
        "(A100) and sm_100 (B200) the same kernels compile; `spills` or `too large` there says that the block sizes chosen for sm_90 do",
        "not suit.",
        "",
    ]
    module = None
    for one in built:
        if one.module != module:
            module = one.module
            lines += ["", f"## {module}", ""]
            lines += [
                "| kernel | build | warps × stages | sm_90: registers, shared KiB, wgmma | sm_80 | sm_100 |",
                "|---|---|---|---|---|---|",
            ]
        cells = [_cell(one.reports[arch], one.build) for arch in ARCHITECTURES]
        lines.append("| " + " | ".join((f"`{one.kernel}`", one.build.label, f"{one.build.warps} × {one.build.stages}", *cells)) + " |")
    allowed = [(one, code) for one in built for code in one.reports[ARCHITECTURES[0]].warnings if code in one.build.allowed]
    if allowed:
        lines += ["", "## Warnings of ptxas that are allowed", "", "| kernel | build | warning | why |", "|---|---|---|---|"]
        lines += [f"| `{one.kernel}` | {one.build.label} | {code} | {one.build.allowed[code]} |" for one, code in allowed]
    return "\n".join(lines) + "\n"


def _cell(found: Report, build: Build) -> str:
    if found.failed:
        return "does not compile"
    said = [str(found.registers), f"{found.shared / 1024:.1f}"]
    if build.matrix and found.arch == ARCHITECTURES[0]:
        said.append(str(found.matrix))
    if found.spilled or found.local:
        said.append("spills")
    if found.shared > SHARED_LIMIT[found.arch]:
        said.append("too large")
    return ", ".join(said)


def _builds(module: str) -> tuple[Build, ...]:
    builds: tuple[Build, ...] = importlib.import_module(module).BUILDS
    return builds


def _reports(module: str, n: int, architectures: tuple[int, ...]) -> dict[int, Report]:
    return {arch: report(_builds(module)[n], arch) for arch in architectures}
