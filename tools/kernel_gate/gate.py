"""Compile all Triton kernels without a GPU, in parallel, and check their machine code.

The checks read registers, spills, shared memory, matrix instructions and warnings. Triton compiles
to PTX; its bundled ptxas, cuobjdump and nvdisasm do the rest. No kernel is launched, and no GPU is
needed or searched.
"""

from __future__ import annotations

import ast
import bisect
import hashlib
import importlib
import itertools
import multiprocessing
import os
import pkgutil
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import kernels
from tools.kernel_gate.jit import argument, compiled

# Names of integers that are token counts, or strides of rows with one number per token.
COUNTS = {
    "tokens",
    "tq",
    "tk",
    "t",
    "count",
    "others",
    "positions",
    "rows",
    "keys",
    "valid_b",
    "valid_batch",
}
COUNTS |= {f"{name}_{part}" for name in ("bias", "lse") for part in ("batch", "head", "row")}
ARCHITECTURES = (90, 80, 100)  # all checks apply to the first one
TOGETHER = 8  # builds that a process disassembles in one call
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}  # most bytes per block
ALLOWED = {
    "C7519": "ptxas puts a wait before products whose left operand lies in registers; "
    "it serialises nothing"
}

INTRODUCTION = """\
# The kernels' machine code

`python -m tools.kernel_gate --write` writes this page; a test compiles every kernel again and
compares. Triton {triton} and its ptxas compile without a GPU, in the shapes and dtypes in which
layers and operations launch the kernels. SHA-256 of the sources:
`{sources}`.

Each figure is the largest over all builds of a kernel; speeds are in `docs/benchmarks/`. On sm_90
(H100, H200) no kernel spills registers or uses local memory, shared memory is at most {limit}
bytes, and ptxas gives no warning that is not listed below.

- wgmma: the smallest number of wgmma instructions in a build; all of the kernel's matrix products
  use them. `-`: the kernel has no matrix products, or only small ones.
- sm_80 (A100), sm_100 (B200): number of builds that spill or need too much shared memory there. The
  block sizes are those for sm_90.
"""

T = TypeVar("T")
# Number of finished builds, number of builds, and the name of one.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Build:
    """One specialisation of a Triton kernel, which a launch compiles.

    module, kernel: module and name of the ``@triton.jit`` function.
    label: description of the first launch that needs this build.
    types: (argument, Triton type) of all arguments that are no constants ("*bf16", "i32", "fp32").
    constants: (argument, value) of all other arguments.
    aligned: arguments known to be multiples of 16 (pointers: of 16 bytes).
    warps, stages: options of the compilation.
    """

    module: str
    kernel: str
    label: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    warps: int
    stages: int

    @property
    def function(self) -> Any:
        """Return the kernel, a ``@triton.jit`` function."""
        return getattr(importlib.import_module(self.module), self.kernel)

    def arguments(self) -> dict[str, Any]:
        """Return name -> value of the arguments and options of the kernel's compilation."""
        given = {name: argument(kind, name in self.aligned) for name, kind in self.types}
        return {**dict(self.constants), **given, "num_warps": self.warps, "num_stages": self.stages}

    @property
    def matrix(self) -> bool:
        """True if all matrix products of this build must be wgmma instructions.

        This is required if the kernel is in the list MATRIX of its module and a bfloat16 pointer is
        among the arguments.
        """
        kernels = getattr(importlib.import_module(self.module), "MATRIX", ())
        return (
            any(each is self.function for each in kernels) and "*bf16" in dict(self.types).values()
        )


@dataclass(frozen=True)
class Report:
    """Result of one build on one architecture.

    failed: reason why the build did not compile, or "".
    """

    arch: int
    registers: int = 0
    spilled: int = 0  # bytes: stores and loads on sm_90, the stack on other architectures
    shared: int = 0  # bytes per block
    local: int = 0  # instructions on local memory; this field and the following: only on sm_90
    rows: int = 0  # rows of its narrowest bfloat16 product; wgmma needs at least 64
    matrix: int = 0  # wgmma instructions
    slow_matrix: int = 0  # matrix instructions of the older kind
    warnings: tuple[str, ...] = ()
    # Arguments that a program stores and loads in different layouts, without a barrier.
    crossed: tuple[str, ...] = ()
    failed: str = ""

    def faults(self, build: Build) -> list[str]:
        """Return a line for each fault of the build, or an empty list."""
        if self.failed:
            return [f"does not compile: {self.failed}"]
        found = []
        if self.spilled:
            found.append(f"spills {self.spilled} bytes")
        if self.local:
            found.append(f"{self.local} instructions on local memory")
        if self.shared > SHARED_LIMIT[self.arch]:
            found.append(f"{self.shared} bytes of shared memory, over {SHARED_LIMIT[self.arch]}")
        if build.matrix and self.arch == ARCHITECTURES[0] and self.rows >= 64:
            found += [] if self.matrix else ["no HGMMA"]
            found += [f"{self.slow_matrix} HMMA and wgmma"] if self.slow_matrix else []
        found += [f"ptxas warns {code}" for code in self.warnings if code not in ALLOWED]
        found += [f"loads {name} in another layout than it stores it" for name in self.crossed]
        return found


def reason(error: Exception) -> str:
    """Return the error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def report(build: Build, arch: int) -> Report:
    """Compile ``build`` for sm_<arch>, read the machine code and return the report."""
    return reports([build], arch)[0]


def reports(builds: Sequence[Build], arch: int) -> list[Report]:
    """Return the `report` of each build.

    nvdisasm, which takes a third of a second to start, is called only once for all builds.
    """
    found = [_compiled(build, arch) for build in builds]
    listings = iter(disassembled([cubin for _, cubin in found if cubin]))
    return [_with_code(each, next(listings)) if cubin else each for each, cubin in found]


def _compiled(build: Build, arch: int) -> tuple[Report, bytes]:
    """Return the compilers' report and, on sm_90, the machine code to disassemble.

    The code is b"" on other architectures and if the build did not compile.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        made = compiled(build.function, build.arguments(), arch)
    except Exception as error:  # any error of Triton's passes is a fault of this build
        return Report(arch, failed=reason(error)), b""
    if missing := {"ttir", "ttgir", "ptx"} - set(made.asm):
        kept = (
            f"Triton's cache has it without {', '.join(sorted(missing))}: set TRITON_CACHE_DIR to "
            "another folder"
        )
        return Report(arch, failed=kept), b""
    # Triton 3.7 makes such a program for sm_100 of a product of 64 rows in three parts of TF32.
    if re.search(r"^\s*trap;", made.asm["ptx"], re.MULTILINE):
        return Report(arch, failed="the compiled program traps"), b""
    tools = Path(get_ptxas(arch).path)
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        cubin.write_bytes(made.asm["cubin"])
        used = dict(
            re.findall(
                r"\b(REG|STACK|LOCAL):(\d+)",
                _run(tools.with_name("cuobjdump"), "-res-usage", cubin),
            )
        )
        found = Report(
            arch,
            registers=int(used["REG"]),
            spilled=int(used["STACK"]) + int(used["LOCAL"]),
            shared=int(made.metadata.shared),
        )
        if arch != ARCHITECTURES[0]:
            return found, b""
        ptx.write_text(made.asm["ptx"])
        log = _run(tools, "-v", f"--gpu-name=sm_{arch}a", "-o", cubin, ptx)
        code = cubin.read_bytes()
    found = replace(
        found,
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
        rows=min(
            (
                int(rows)
                for rows in re.findall(r"tt\.dot .*: tensor<(\d+)x\d+xbf16> \*", made.asm["ttir"])
            ),
            default=0,
        ),
        warnings=tuple(sorted(set(re.findall(r"\bC75\d\d\b", log)))),
        crossed=tuple(crossed_layouts(made.asm["ttgir"])),
    )
    return found, code


def _with_code(found: Report, listing: str) -> Report:
    return replace(
        found,
        local=len(re.findall(r"\b(?:LDL|STL)\b", listing)),
        matrix=len(re.findall(r"\bHGMMA\b", listing)),
        slow_matrix=len(re.findall(r"\bHMMA\b", listing)),
    )


def disassembled(cubins: Sequence[bytes]) -> list[str]:
    """Return the instructions of each cubin, one per line.

    nvdisasm reads the code of all cubins as one program, whose lines begin with their addresses.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    if not cubins:
        return []
    arch, code = ARCHITECTURES[0], [_instructions(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(b"".join(code))
        # -ndf: do not find labels by data flow analysis.
        listing = _run(
            Path(get_ptxas(arch).path).with_name("nvdisasm"),
            "--binary",
            f"SM{arch}a",
            "-ndf",
            file.name,
        )
    ends, listings = list(itertools.accumulate(map(len, code))), [list[str]() for _ in code]
    for line in listing.splitlines():
        if address := re.match(r"\s*/\*([0-9a-f]+)\*/", line):
            listings[bisect.bisect_right(ends, int(address[1], 16))].append(line)
    return ["\n".join(lines) for lines in listings]


def _instructions(cubin: bytes) -> bytes:
    """Return the contents of the executable sections of a 64-bit ELF file."""
    start, size, count = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HH", cubin, 58)
    sections = (
        struct.unpack_from("<IIQQQQ", cubin, start + size * number) for number in range(count)
    )
    executable = 4
    found = b"".join(
        cubin[offset : offset + length]
        for _, _, flags, _, offset, length in sections
        if flags & executable
    )
    if not found:
        raise RuntimeError("ptxas wrote no code")
    return found


def crossed_layouts(ttgir: str) -> list[str]:
    """Return the pointer arguments that a program loads and stores in different tensor layouts.

    Only loads and stores without a barrier between them count: one thread may then load what
    another thread has stored, without any order between the two. A kernel that contains a barrier
    is not checked.
    """
    if "gpu.barrier" in ttgir or "ttg.barrier" in ttgir:
        return []
    origin: dict[str, str] = {}
    found: dict[str, dict[str, set[str]]] = {}
    for name in re.findall(r"(%\w+): !tt\.ptr<", ttgir):
        origin[name] = name
    for line in ttgir.splitlines():
        made = re.match(
            r"\s*(%\w+)(?::\d+)? = (?:tt\.(?:addptr|splat|broadcast|expand_dims|reshape)"
            r"|ttg\.convert_layout) (%\w+)",
            line,
        )
        if made and made[2] in origin:
            origin[made[1]] = origin[made[2]]
        for what, at, kind in re.findall(r"(tt\.load|tt\.store) (%\w+).* : (tensor<.*>)", line):
            if at in origin:
                found.setdefault(origin[at], {}).setdefault(what, set()).add(
                    re.sub(r".*, (#\w+)>.*", r"\1", kind)
                )
    return [
        name
        for name, used in found.items()
        if len(used) == 2 and len(set.union(*used.values())) > 1
    ]


def _run(tool: Path, *arguments: str | Path) -> str:
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{tool.name} failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
        )
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Built:
    """Build with its reports by architecture."""

    build: Build
    reports: dict[int, Report]

    @property
    def name(self) -> str:
        """Name of the build in error messages."""
        return f"{self.build.module}: {self.kernel}, {self.build.label}"

    @property
    def kernel(self) -> str:
        """The kernel's name without its leading underscore."""
        return self.build.kernel.lstrip("_")

    def faults(self) -> list[str]:
        """Return a line for each fault of the build, or an empty list.

        On the first architecture all faults count. On the other ones only a failed compilation
        does.
        """
        first, *others = (self.reports[arch] for arch in ARCHITECTURES if arch in self.reports)
        against = [f"sm_{first.arch}: {fault}" for fault in first.faults(self.build)]
        return against + [
            f"sm_{other.arch}: does not compile: {other.failed}" for other in others if other.failed
        ]


def kernels_under(prefix: str) -> set[tuple[str, str]]:
    """Return (module, name) of the Triton kernels in the modules under ``prefix``.

    A kernel is a function whose name ends with ``_kernel``.
    """
    found = set()
    for module in (each.name for each in pkgutil.walk_packages(kernels.__path__, "kernels.")):
        if ".triton" in module and f"{module}.".startswith(f"{prefix.rstrip('.')}."):
            names = (
                name
                for name, value in vars(importlib.import_module(module)).items()
                if name.endswith("_kernel") and hasattr(value, "fn")
            )
            found |= {
                (module, name)
                for name in names
                if getattr(importlib.import_module(module), name).fn.__module__ == module
            }
    return found


def covering(builds: Sequence[Build], *, sizes: bool = True) -> list[Build]:
    """Return a few builds of each kernel that together have every value of its constants and types.

    The first build of each kernel is always included.

    sizes: False: the values of integer constants need not be covered.
    """
    values: dict[tuple[str, str], dict[int, set[tuple[str, str]]]] = {}
    for n, build in enumerate(builds):
        held = (
            each
            for each in (*build.constants, *build.types)
            if sizes or not isinstance(each[1], int) or isinstance(each[1], bool)
        )
        values.setdefault((build.module, build.kernel), {})[n] = {
            (key, repr(value)) for key, value in held
        }
    chosen = set[int]()
    for of in values.values():
        best, missing = next(iter(of)), set[tuple[str, str]]().union(*of.values())
        while missing:
            chosen.add(best)
            missing -= of[best]
            best = max(of, key=lambda n: len(of[n] & missing))
    return [builds[n] for n in sorted(chosen)]


def in_rows(build: Build) -> Build | None:
    """Return the build for documents in rows, or None if it is the same build.

    Token counts of documents are small and no multiples of 16. The result is also None for heads of
    width 256, which no configured model has.
    """
    constants = {
        **dict(build.constants),
        **({"SEGMENTS": 1} if "SEGMENTS" in dict(build.constants) else {}),
    }
    aligned = tuple(name for name in build.aligned if name not in COUNTS)
    short = replace(build, constants=(*constants.items(),), aligned=aligned)
    return (
        None if short == build or 256 in (constants.get("DK"), constants.get("PADDED")) else short
    )


def build_all(
    builds: Sequence[Build], architectures: tuple[int, ...], progress: Progress
) -> list[Built]:
    """Compile the builds for all architectures and return them with their reports.

    The last argument is called with the progress.
    """
    found = in_processes(partial(_reports, architectures=architectures), builds, progress)
    return [Built(build, by_arch) for build, by_arch in zip(builds, found, strict=True)]


def in_processes(
    work: Callable[[Sequence[Build]], list[T]], builds: Sequence[Build], progress: Progress
) -> list[T]:
    """Return the results of ``work`` for all builds, in their order.

    The builds are computed in groups, in as many processes as cores exist. The last argument is
    called with the progress.
    """
    found: dict[Build, T] = {}
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        some = (builds[start : start + TOGETHER] for start in range(0, len(builds), TOGETHER))
        pending = {pool.submit(work, each): each for each in some}
        for future in as_completed(pending):
            for build, result in zip(pending[future], future.result(), strict=True):
                found[build] = result
                progress(len(found), len(builds), f"{build.module}: {build.label}")
    return [found[build] for build in builds]


def sources_hash() -> str:
    """Return the SHA-256 of the syntax of the kernels and of this gate, for docs/kernels.md.

    Comments, docstrings and layout do not change the hash.
    """
    folders = (Path(kernels.__file__).parent, Path(__file__).parent)
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    syntax = [
        (path.relative_to(folders[0].parent).as_posix(), _syntax(ast.parse(path.read_bytes())))
        for path in paths
    ]
    return hashlib.sha256(repr(syntax).encode()).hexdigest()


def _syntax(node: Any) -> Any:
    """Return a syntax tree as nested lists.

    Fields without a value are left out, because newer versions of Python have more of them.
    """
    if isinstance(node, list):
        kept = [
            each
            for each in node
            if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        ]
        return [_syntax(each) for each in kept]
    if isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty constants to format specifications
        node.values = [each for each in node.values if getattr(each, "value", None) != ""]
    if isinstance(node, ast.AST):
        fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
        return [type(node).__name__, *((name, _syntax(value)) for name, value in fields.items())]
    return node


def page(built: list[Built], triton_version: str) -> str:
    """Return the text of docs/kernels.md: a row per kernel, with the maximum over its builds."""
    lines = INTRODUCTION.format(
        triton=triton_version, sources=sources_hash(), limit=SHARED_LIMIT[90]
    ).splitlines()
    rows: dict[str, dict[str, list[Built]]] = {}
    for one in built:
        rows.setdefault(one.build.module.removeprefix("kernels."), {}).setdefault(
            one.kernel, []
        ).append(one)
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
            products = [
                one.reports[ARCHITECTURES[0]].matrix
                for one in builds
                if one.build.matrix and one.reports[ARCHITECTURES[0]].rows >= 64
            ]
            cells = (
                str(len(builds)),
                str(max(report.registers for report in first)),
                f"{max(report.shared for report in first) / 1024:.1f}",
                str(min(products)) if products else "-",
                *(
                    str(sum(_unsuited(one.reports[arch]) for one in builds) or "")
                    for arch in ARCHITECTURES[1:]
                ),
            )
            lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    allowed: dict[tuple[str, str], set[str]] = {}
    for one in built:
        for code in one.reports[ARCHITECTURES[0]].warnings:
            if code in ALLOWED:
                allowed.setdefault((code, ALLOWED[code]), set()).add(f"`{one.kernel}`")
    if allowed:
        lines += [
            "",
            "## Warnings of ptxas that are allowed",
            "",
            "| warning | why | kernels |",
            "|---|---|---|",
        ]
        lines += [
            f"| {code} | {why} | {', '.join(sorted(kernels_))} |"
            for (code, why), kernels_ in sorted(allowed.items())
        ]
    return "\n".join(lines) + "\n"


def sections(text: str) -> dict[str, str]:
    """Return title -> text of the sections of docs/kernels.md, one for each module.

    The last section lists the allowed warnings.
    """
    return {part.partition("\n")[0]: part.strip() for part in text.split("\n## ")[1:]}


def _unsuited(found: Report) -> bool:
    """Return True if a build failed, spills registers, or needs too much shared memory."""
    return bool(
        found.failed or found.spilled or found.local or found.shared > SHARED_LIMIT[found.arch]
    )


def _reports(builds: Sequence[Build], architectures: tuple[int, ...]) -> list[dict[int, Report]]:
    by_arch = {arch: reports(builds, arch) for arch in architectures}
    return [{arch: found[n] for arch, found in by_arch.items()} for n in range(len(builds))]
