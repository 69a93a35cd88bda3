"""The compile gate: all kernels pass it and docs/kernels.md tells of them as they are; what it is to catch, it catches."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from kernels.tiles import Build
from tests.test_house import python_sources
from tools.kernel_gate.gate import covering, modules

ROOT = Path(__file__).parents[2]

# One kernel that is as it should be and one for each fault; printed: label -> faults on sm_90.
FAULTY = """
import json
import triton
import triton.language as tl
from kernels.tiles import Build
from tools.kernel_gate.gate import report

@triton.jit
def _product(a, b, c, n, M: tl.constexpr, N: tl.constexpr, COPIES: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    acc = tl.zeros((M, M), tl.float32)
    other = tl.zeros((M, M), tl.float32)
    for t in range(n):
        x = tl.load(a + t * M * N + i[:, None] * N + j[None, :])
        y = tl.load(b + t * M * N + i[:, None] * N + j[None, :])
        acc += tl.dot(x, tl.trans(y))
        if COPIES:
            other += tl.dot(y, tl.trans(x))
    tl.store(c + i[:, None] * M + i[None, :], acc + other)

@triton.jit
def _unknown(a, N: tl.constexpr):
    tl.store(a + tl.arange(0, N), tl.no_such_function(a))

def build(label, dtype="bf16", copies=False, warps=8, matrix=True, stages=2, rows=128):
    types = {"a": "*" + dtype, "b": "*" + dtype, "c": "*fp32", "n": "i32"}
    return Build(label, _product, types, {"M": rows, "N": 64, "COPIES": copies}, warps, stages, matrix=matrix)

if __name__ == "__main__":
    builds = [
        build("good"),
        build("spills", copies=True, warps=1),
        build("shared memory", stages=9, dtype="fp32", matrix=False),
        build("no wgmma", rows=32, warps=4),
        Build("does not compile", _unknown, {"a": "*fp32"}, {"N": 16}, 4, 1),
    ]
    print(json.dumps({each.label: report(each, 90).faults(each) for each in builds}))
"""


def run(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """A command of this repository, in a process where Triton compiles."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.mark.timeout(1500)
def test_every_kernel_passes_on_an_h100() -> None:
    """In so many builds that every size, form and type of each occurs; all builds are the slow test's."""
    done = run("-m", "tools.kernel_gate", "--sm", "90", "--few", timeout=1400)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_kernel_builds_everywhere_and_the_page_is_true() -> None:
    done = run("-m", "tools.kernel_gate", "--check", timeout=1400)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_kernel_passes_for_rows_of_documents() -> None:
    """Any number of tokens, where Triton compiles anew: in kernels of every size that a recipe has."""
    done = run("-m", "tools.kernel_gate", "--sm", "90", "--documents", timeout=1400)
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(
        f"kernels.{op}.triton" in done.stdout for op in ("fem_attention", "aft_read", "ssm_read", "cem_attention", "time_decay_scan")
    )


def test_each_fault_is_caught(tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{FAULTY}")
    done = run(str(script), timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    faults = json.loads(done.stdout)
    assert faults["good"] == []
    assert any("spills" in fault for fault in faults["spills"]) and any("local memory" in fault for fault in faults["spills"])
    assert any("shared memory, over" in fault for fault in faults["shared memory"])
    assert faults["no wgmma"][0] == "no HGMMA" and "HMMA beside wgmma" in faults["no wgmma"][1]
    assert faults["does not compile"][0].startswith("does not compile: ")


def test_every_kernel_that_is_launched_is_built() -> None:
    """By name and module: kernels end in ``_kernel``, what they call does not."""
    written, built = set(), set()
    for path, text in python_sources().items():
        if not path.startswith("kernels/") or "triton" not in path:
            continue
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                assert [ast.unparse(each) for each in node.decorator_list] == ["triton.jit"], f"{module}.{node.name}"
                written.add((module, node.name))
        builds = getattr(importlib.import_module(module), "BUILDS", ())
        built |= {(build.kernel.fn.__module__, build.kernel.fn.__name__) for build in builds}
    assert len(written) > 20
    assert written == built


def test_few_builds_have_each_value_of_each_constant_and_type() -> None:
    def values(builds: Iterable[Build]) -> set[tuple[str, str, str]]:
        held = ((build.kernel.fn.__name__, (build.constants, build.types)) for build in builds)
        return {(name, key, repr(value)) for name, both in held for each in both for key, value in each.items()}

    for module in modules():
        builds, few = importlib.import_module(module).BUILDS, covering(module)
        assert values(builds[n] for n in few) == values(builds), module
        firsts = {build.kernel.fn.__name__: n for n, build in reversed([*enumerate(builds)])}
        assert {*firsts.values()} <= {*few}, module


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels.nothing"], "no module under 'kernels.nothing' has builds"),
        (["kernels.cem_attention", "--write"], "--write and --check are about all"),
    ],
)
def test_a_wrong_call_is_one_line(arguments: list[str], message: str) -> None:
    done = run("-m", "tools.kernel_gate", *arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
