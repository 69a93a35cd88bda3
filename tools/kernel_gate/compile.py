"""One kernel to machine code without a GPU, and what is read off it: registers, spills, shared memory, matrix instructions, warnings.

Triton compiles to PTX; its bundled ptxas, cuobjdump and nvdisasm do the rest. Nothing is launched.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.tiles import Build

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
        code = _run(tools.with_name("nvdisasm"), "-c", cubin)
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
