"""All Triton kernels to machine code without a GPU, in parallel: registers, spills, shared memory, matrix instructions, warnings.

Triton compiles to PTX; its bundled ptxas, cuobjdump and nvdisasm do the rest. Nothing is launched, no GPU is needed or looked for.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import kernels

if TYPE_CHECKING:  # it imports Triton, of which the command says first that it is missing
    from kernels.tiles import Build

# Names of integers that count tokens, or stand between rows of a number a token.
COUNTS = {"tokens", "tq", "tk", "t", "count", "others", "positions", "rows", "keys", "valid_b", "valid_batch"}
COUNTS |= {f"{name}_{part}" for name in ("bias", "lse") for part in ("batch", "head", "row")}
ARCHITECTURES = (90, 80, 100)  # the first is the one that every kernel must pass
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes a block may have


@dataclass(frozen=True)
class Report:
    """What one build came to on one architecture; ``failed``: why it did not compile, or "" where it did."""

    arch: int
    registers: int = 0
    spilled: int = 0  # bytes: stores and loads on sm_90, the stack elsewhere
    shared: int = 0  # bytes a block
    local: int = 0  # on sm_90, as all that follows: instructions that touch local memory
    matrix: int = 0  # wgmma
    slow_matrix: int = 0  # the older kind of matrix instruction
    warnings: tuple[str, ...] = ()
    failed: str = ""

    def faults(self, build: Build) -> list[str]:
        """What the gate holds against it."""
        if self.failed:
            return [f"does not compile: {self.failed}"]
        found = []
        if self.spilled:
            found.append(f"spills {self.spilled} bytes")
        if self.local:
            found.append(f"{self.local} instructions on local memory")
        if self.shared > SHARED_LIMIT[self.arch]:
            found.append(f"{self.shared} bytes of shared memory, over {SHARED_LIMIT[self.arch]}")
        if build.matrix and self.arch == ARCHITECTURES[0]:
            found += [] if self.matrix else ["no HGMMA"]
            found += [f"{self.slow_matrix} HMMA beside wgmma"] if self.slow_matrix else []
        found += [f"ptxas warns {code}" for code in self.warnings if code not in build.allowed]
        return found


def report(build: Build, arch: int) -> Report:
    """Compile ``build`` for sm_<arch> and read the machine code."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    names = build.kernel.arg_names
    signature = {name: "constexpr" if name in build.constants else build.types[name] for name in names}
    aligned = [n for n, name in enumerate(names) if signature[name].startswith("*") or name in build.aligned]
    source = ASTSource(
        build.kernel,
        signature=signature,
        constexprs=dict(build.constants),
        attrs={(n,): [["tt.divisibility", 16]] for n in aligned},
    )
    try:
        made = compile_kernel(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": build.warps, "num_stages": build.stages})
    except Exception as error:  # whatever Triton's passes raise is this build's fault, to be told beside the others'
        return Report(arch, failed=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
    tools = Path(get_ptxas(arch).path)
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        cubin.write_bytes(made.asm["cubin"])
        used = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", _run(tools.with_name("cuobjdump"), "-res-usage", cubin)))
        found = Report(arch, registers=int(used["REG"]), spilled=int(used["STACK"]) + int(used["LOCAL"]), shared=int(made.metadata.shared))
        if arch != ARCHITECTURES[0]:
            return found
        ptx.write_text(made.asm["ptx"])
        said = _run(tools, "-v", f"--gpu-name=sm_{arch}a", "-o", cubin, ptx)
        code = _run(tools.with_name("nvdisasm"), "-c", "-ndf", cubin)  # no labels by data flow, which take a third of its time
    return replace(
        found,
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said))),
        local=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        matrix=len(re.findall(r"\bHGMMA\b", code)),
        slow_matrix=len(re.findall(r"\bHMMA\b", code)),
        warnings=tuple(sorted(set(re.findall(r"\bC75\d\d\b", said)))),
    )


def _run(tool: Path, *arguments: str | Path) -> str:
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool.name} failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return done.stdout + done.stderr


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


def covering(module: str) -> list[int]:
    """Of a module's builds each kernel's first, and the few in which every value of all its constants and types occurs, by number."""
    values: dict[str, dict[int, set[tuple[str, str]]]] = {}
    for n, build in enumerate(_builds(module)):
        held = {(key, repr(value)) for key, value in (*build.constants.items(), *build.types.items())}
        values.setdefault(str(build.kernel.fn.__name__), {})[n] = held
    chosen = set[int]()
    for of in values.values():
        best, missing = next(iter(of)), set[tuple[str, str]]().union(*of.values())
        while missing:
            chosen.add(best)
            missing -= of[best]
            best = max(of, key=lambda n: len(of[n] & missing))
    return sorted(chosen)


def in_rows(build: Build) -> Build | None:
    """The same for rows of documents, whose tokens are few and no multiple of 16; None where it is not another.

    Nor for heads of 256, which no recipe has: two of fem_attention's kernels then spill up to 152 bytes.
    """
    constants = {**build.constants, **({"SEGMENTS": 1} if "SEGMENTS" in build.constants else {})}
    short = replace(build, constants=constants, aligned=tuple(name for name in build.aligned if name not in COUNTS))
    return None if short == build or " 256" in build.label else short


def build_all(
    prefix: str, architectures: tuple[int, ...], told: Callable[[int, int, str], None], *, few: bool = False, documents: bool = False
) -> list[Built]:
    """Every build under ``prefix``, or a few that cover them; told(done, of, name) after each. As many processes as there are cores.

    documents: these few as `in_rows` has them.
    """
    listed = [(module, n) for module in modules(prefix) for n in (covering(module) if few or documents else range(len(_builds(module))))]
    builds = {(module, n): in_rows(_builds(module)[n]) if documents else _builds(module)[n] for module, n in listed}
    kept = {which: build for which, build in builds.items() if build is not None}
    reports: dict[tuple[str, int], dict[int, Report]] = {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(_reports, *which, architectures, documents): which for which in kept}
        for done, future in enumerate(as_completed(pending), start=1):
            which = pending[future]
            reports[which] = future.result()
            told(done, len(kept), f"{which[0]}: {kept[which].label}")
    return [Built(which[0], build, reports[which]) for which, build in kept.items()]


def page(built: list[Built], triton_version: str) -> str:
    """docs/kernels.md: a row a kernel, the most of its builds."""
    lines = [
        "# The kernels' machine code",
        "",
        "Written by `python -m tools.kernel_gate --write`; a test compiles all again and compares. Built",
        f"without a GPU, by Triton {triton_version} and its ptxas, at production shapes and types.",
        "It says what a kernel takes at the most; speeds are in `docs/benchmarks/`.",
        "",
        "On sm_90 (H100, H200) every kernel is without spills and local memory, shared memory is within",
        f"{SHARED_LIMIT[90]} bytes, and ptxas warns of nothing that is not listed below. wgmma: all of the kernel's",
        "products are wgmma in at least so many instructions; `-`: it multiplies little, or small tiles.",
        "For sm_80 (A100) and sm_100 (B200) the same kernels compile; a number there: so many builds spill or need",
        "too much shared memory; block sizes are sm_90's.",
    ]
    rows: dict[str, dict[str, list[Built]]] = {}
    for one in built:
        rows.setdefault(one.module.removeprefix("kernels."), {}).setdefault(one.kernel, []).append(one)
    for module, kernels_ in rows.items():
        lines += [
            "",
            f"## {module}",
            "",
            "| kernel | builds | registers | shared KiB | wgmma | sm_80 | sm_100 |",
            "|---|---|---|---|---|---|---|",
        ]
        for kernel, builds in kernels_.items():
            first = [one.reports[ARCHITECTURES[0]] for one in builds]
            products = [one.reports[ARCHITECTURES[0]].matrix for one in builds if one.build.matrix]
            cells = (
                str(len(builds)),
                str(max(report.registers for report in first)),
                f"{max(report.shared for report in first) / 1024:.1f}",
                str(min(products)) if products else "-",
                *(str(sum(_unsuited(one.reports[arch]) for one in builds) or "") for arch in ARCHITECTURES[1:]),
            )
            lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    allowed: dict[tuple[str, str], set[str]] = {}
    for one in built:
        for code in one.reports[ARCHITECTURES[0]].warnings:
            if code in one.build.allowed:
                allowed.setdefault((code, one.build.allowed[code]), set()).add(f"`{one.kernel}`")
    if allowed:
        lines += ["", "## Warnings of ptxas that are allowed", "", "| warning | why | kernels |", "|---|---|---|"]
        lines += [f"| {code} | {why} | {', '.join(sorted(kernels_))} |" for (code, why), kernels_ in sorted(allowed.items())]
    return "\n".join(lines) + "\n"


def _unsuited(found: Report) -> bool:
    """Whether a build spills or needs more shared memory than there is."""
    return bool(found.failed or found.spilled or found.local or found.shared > SHARED_LIMIT[found.arch])


def _builds(module: str) -> tuple[Build, ...]:
    builds: tuple[Build, ...] = importlib.import_module(module).BUILDS
    return builds


def _reports(module: str, n: int, architectures: tuple[int, ...], documents: bool) -> dict[int, Report]:
    build = in_rows(_builds(module)[n]) if documents else _builds(module)[n]
    assert build is not None
    return {arch: report(build, arch) for arch in architectures}
