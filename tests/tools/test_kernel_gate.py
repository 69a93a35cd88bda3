"""The compile gate passes all kernels as described in docs/kernels.md, and detects the faults for
which it exists.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from fem_common.errors import UserError
from kernels.check import suites
from tests.test_house import python_sources
from tools.kernel_gate.__main__ import PAGE, _same
from tools.kernel_gate.gate import Build, covering, kernels_under, sources_hash
from tools.kernel_gate.launches import _case, recorded
from tools.kernel_gate.warm import key_of

ROOT = Path(__file__).parents[2]
OLDEST = Path(os.environ.get("FEM_OLDEST_TRITON", ROOT / ".venv" / "oldest-triton"))
PINNED = (ROOT / "tests" / "oldest-triton.txt").read_text().split("triton==")[1].split(";")[0]

OPERATIONS = sorted({module.split(".")[1] for module, _ in kernels_under("kernels")})
# Their kernels are compiled separately for rows of documents.
IN_ROWS = ("fem_attention", "aft_read", "ssm_read", "cem_attention", "time_decay_scan")

# One correct kernel and one for each fault; prints label -> faults on sm_90.
FAULTY = """
import json
from pathlib import Path
import triton
import triton.language as tl
from tools.kernel_gate.gate import Build, reports
from tools.kernel_gate.warm import _entries

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

@triton.jit
def _turned(a, N: tl.constexpr):
    i, j = tl.arange(0, N), tl.arange(0, N)
    x = tl.load(a + i[:, None] * N + j[None, :])
    tl.store(a + i[:, None] + j[None, :] * N, x)

@triton.jit
def _traps(a, N: tl.constexpr):
    x = tl.load(a + tl.arange(0, N))
    x = tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [x], tl.float32, False, 1)
    tl.store(a + tl.arange(0, N), x)

MATRIX = (_product,)

def build(label, dtype="bf16", copies=False, warps=8, stages=2, rows=128):
    types = {"a": "*" + dtype, "b": "*" + dtype, "c": "*fp32", "n": "i32"}
    constants = {"M": rows, "N": 64, "COPIES": copies}
    return Build("__main__", "_product", label, (*types.items(),), (*constants.items(),), ("a", "b", "c"), warps, stages)

if __name__ == "__main__":
    builds = [
        build("good"),
        build("spills", copies=True, warps=1),
        build("shared memory", stages=9, dtype="fp32"),
        build("no wgmma", rows=64, warps=2),
        Build("__main__", "_unknown", "does not compile", (("a", "*fp32"),), (("N", 16),), (), 4, 1),
        Build("__main__", "_turned", "turned", (("a", "*fp32"),), (("N", 64),), ("a",), 4, 1),
        Build("__main__", "_traps", "traps", (("a", "*fp32"),), (("N", 64),), ("a",), 4, 1),
    ]
    faults = {each.label: found.faults(each) for each, found in zip(builds, reports(builds, 90), strict=True)}
    cached = _entries(builds[4:6], 90, Path(__file__).parent / "cache", "")
    print(json.dumps({**faults, "cached": [bool(folder) for folder, _ in cached], "uncached": [fault for _, fault in cached if fault]}))
"""  # noqa: E501

# Layers without g whose heads are 85 or 102 wide: rows start at multiples of 2 or 4 bytes. Prints
# the number of builds and their faults.
UNEVEN = """
from dataclasses import replace
from tools.kernel_gate.gate import report
from tools.kernel_gate.launches import _alike, _layer, models

def layers(base):
    for mixer, engine in (("fem_softmax", "triton"), ("fem_gla", "")):
        for budget in ("i", "ii"):
            model = replace(base, mixer=mixer, fem=replace(base.fem, budget=budget, gate=False))
            yield f"{mixer} {budget}", _layer(model.blocks()[0], model, engine)

attend = ("fem_attention.triton", "attention_backward", "linear_attention.triton", "linear_attention.triton.forward")
builds = [build for build in _alike(layers(models()["fem_sm_1.3b"])) if build.module.endswith(attend)]
print(len(builds), [(build.label, build.kernel, faults) for build in builds if (faults := report(build, 90).faults(build))])
"""  # noqa: E501


# Sizes that no recipe has and that the kernels accept; prints the same as above.
UNCOMMON = """
from dataclasses import replace
import torch
from kernels.check import suites
from tools.kernel_gate.gate import covering, reports
from tools.kernel_gate.launches import _alike, _case

SIZES = {
    "cem_attention": [{"width": 256}],
    "second_order_attention": [{"width": 128}],
    "symmetric_attention": [{"width": 128}, {"width": 256}],
    "fem_projection": [{"n": 67}, {"n": 128}],
    "fem_attention": [{"dk": 64, "dv": 85}, {"dk": 86, "dv": 86}, {"dk": 128, "dv": 192}],
}

def launches(op, size):
    suite = replace(suites()[op], real={**suites()[op].real, **size})
    for case, make in suite.cases.items():
        for dtype in (torch.bfloat16, torch.float32):
            try:
                yield f"{op} {size}: {case}", _case(suite, make, "triton", dtype)
            except ValueError:  # a case that the implementation refuses
                continue

builds = [build for op, sizes in SIZES.items() for size in sizes for build in covering(_alike(launches(op, size)))]
found = [each for n in range(0, len(builds), 8) for each in reports(builds[n : n + 8], 90)]
print(len(builds), [(b.label, b.kernel, faults) for b, r in zip(builds, found) if (faults := r.faults(b))])
"""  # noqa: E501
# FEM's attention, its backward pass and its decoding, in one case each; prints the version of
# Triton, then the same as above.
FEM = """
import torch, triton
from kernels.check import suites
from tools.kernel_gate.gate import reports
from tools.kernel_gate.launches import _alike, _case

suite, launches = suites()["fem_attention"], []
for implementation, case in (("triton", "normal"), ("decode", "one query over a past")):
    launches.append((case, _case(suite, suite.cases[case], implementation, torch.bfloat16)))
builds = list({build.kernel: build for build in _alike(iter(launches))}.values())
found = reports(builds, 90)
print(triton.__version__, len(builds), [(b.label, b.kernel, faults) for b, r in zip(builds, found) if (faults := r.faults(b))])
"""  # noqa: E501

# The launches of one case. "fill": write their builds to a cache at argv[2], packed for argv[3].
# Otherwise: report the builds that a cache contains, requested as the JIT does for tensors of these
# dtypes and addresses; and for float32, of which it contains no build.
CACHED = """
import sys
from pathlib import Path, PurePosixPath
import torch
from triton import knobs
from triton.runtime import driver
from kernels.check import suites
from tools.kernel_gate.jit import Driver
from tools.kernel_gate.launches import _case, build_of
from tools.kernel_gate.warm import fill, pack

class Given:
    def __init__(self, t):
        self.dtype, self.offset = t.dtype, t.storage_offset() * t.element_size()
    def data_ptr(self):
        return 0x7F0000000000 + self.offset

def launches(dtype):
    suite = suites()["fem_attention"]
    made = _case(suite, suite.cases["normal"], "triton", dtype)
    return [(kernel, given) for kernel, given in made if kernel.fn.__module__.endswith("prep") and "backward" not in kernel.fn.__name__]

if sys.argv[1] == "fill":
    builds = [build_of("normal", *each) for each in launches(torch.bfloat16)]
    entries = fill(builds, 90, Path(sys.argv[2]), "", lambda *_: None)
    pack(Path(sys.argv[2]), [entry for entry, _ in entries], PurePosixPath(sys.argv[3]))
else:
    found = []
    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    driver.set_active(Driver(90))
    for kernel, given in launches(torch.bfloat16) + launches(torch.float32)[:1]:
        kernel.run(grid=(1,), warmup=True, **{name: Given(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()})
    print(found)
"""  # noqa: E501

# Sizes at which gradients would spill: the triton implementation refuses them and lists the nearest
# sizes that it accepts.
REFUSED = [
    (
        "cem_attention",
        {"width": 85},
        "normal",
        "head width 85 spills registers on a GPU, 84 and 86 do not",
    ),
    (
        "second_order_attention",
        {"width": 85},
        "normal",
        "head width 85 spills registers on a GPU, 80 and 96 do not",
    ),
    (
        "symmetric_attention",
        {"width": 85},
        "bisoftmax: normal",
        "head width 85 spills registers on a GPU, 80 and 96 do not",
    ),
    ("symmetric_attention", {"width": 192}, "sigmoid: normal", "head width 192 is over 128"),
    (
        "fem_attention",
        {"dk": 85, "dv": 85},
        "normal",
        "gradients of queries 85 wide spill registers on a GPU, of 84 and 86 do not",
    ),
    (
        "fem_attention",
        {"dk": 192, "dv": 96},
        "normal",
        "gradients of queries 192 wide spill registers on a GPU, of 128 do not",
    ),
    (
        "fem_projection",
        {"n": 67},
        "gated linear attention",
        "a conditioner's width 67 spills registers on a GPU, 64 and 80 do not",
    ),
    (
        "fem_projection",
        {"n": 257},
        "gated linear attention",
        "slices of 64 channels take a conditioner of 128, not of 257",
    ),
]


def run(
    *arguments: str, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of this repository in a process in which Triton compiles."""
    env = os.environ | variables
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def by_the_oldest(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the same with the oldest supported Triton."""
    if not OLDEST.is_dir():
        pytest.skip(
            f"no {OLDEST}: `make setup`, or pip install --no-deps --target {OLDEST} -r"
            " tests/oldest-triton.txt"
        )
    return run(
        *arguments,
        timeout=timeout,
        PYTHONPATH=os.pathsep.join(filter(None, (str(OLDEST), os.environ.get("PYTHONPATH")))),
    )


def each_operation(test: Any) -> Any:
    return pytest.mark.slow(
        pytest.mark.timeout(1500)(pytest.mark.parametrize("op", OPERATIONS)(test))
    )


def test_the_page_is_of_todays_kernels() -> None:
    """Comments, docstrings and layout may change; every other change requires compiling all
    kernels, which writes the page.
    """
    text = PAGE.read_text(encoding="utf-8")
    assert f"`{sources_hash()}`" in text, (
        f"{PAGE.name} was written from other sources: run python -m tools.kernel_gate --write"
    )
    tested = re.search(r"^triton==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert tested and f"Triton {tested[1]} and" in text


def test_a_part_of_the_page_is_compared_by_module() -> None:
    text = PAGE.read_text(encoding="utf-8")
    part = "## rotary.triton" + text.partition("\n## rotary.triton")[2].partition("\n## ")[0]
    assert _same(text, f"another head\n\n{part}\n\n## Warnings of ptxas\n", complete=False)
    assert _same(text, text, complete=True)
    assert not _same(
        text.replace(part, part.replace("registers", "stacks")), f"\n{part}", complete=False
    )
    assert not _same(text, f"\n{part}\n\n## rotary.triton.unknown\n", complete=False)
    assert not _same(text, f"\n{part}", complete=True)


@pytest.mark.parametrize("by", [run, pytest.param(by_the_oldest, marks=pytest.mark.slow)])
def test_fem_attention_compiles(by: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = by("-c", FEM)
    assert done.returncode == 0, done.stderr[-2000:]
    triton, builds, faults = done.stdout.split(" ", 2)
    assert triton == (PINNED if by is by_the_oldest else version("triton"))
    assert int(builds) >= 12
    assert faults.strip() == "[]"


@each_operation
def test_every_kernel_passes_by_the_oldest_triton(op: str) -> None:
    done = by_the_oldest("-m", "tools.kernel_gate", "--sm", "90", "--only", op, timeout=1400)
    assert done.returncode == 0, done.stderr[-4000:]


@each_operation
def test_every_kernel_builds_everywhere_and_the_page_is_true(op: str) -> None:
    done = run("-m", "tools.kernel_gate", "--check", "--only", op, timeout=1400)
    assert done.returncode == 0, done.stderr[-4000:]


@each_operation
def test_every_kernel_passes_for_rows_of_documents(op: str) -> None:
    """For any number of tokens, for which Triton compiles separately: kernels of every size in a
    recipe.
    """
    done = run("-m", "tools.kernel_gate", "--sm", "90", "--documents", "--only", op, timeout=1400)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"kernels.{op}.triton" in done.stdout or op not in IN_ROWS


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("script", "least"),
    [(UNEVEN, 12), (UNCOMMON, 100)],
    ids=["rows at any address", "sizes that no recipe has"],
)
def test_what_the_gate_s_page_does_not_show_does_not_spill(script: str, least: int) -> None:
    done = run("-c", script, timeout=1400)
    assert done.returncode == 0, done.stderr[-2000:]
    builds, faults = done.stdout.split(" ", 1)
    assert int(builds) >= least and faults.strip() == "[]"


@pytest.mark.parametrize(("op", "size", "case", "reason"), REFUSED)
def test_sizes_that_would_spill_are_refused(
    op: str, size: dict[str, int], case: str, reason: str
) -> None:
    suite = replace(suites()[op], real={**suites()[op].real, **size})
    with pytest.raises(
        ValueError, match=f"{op}: implementation 'triton' cannot run: {reason}; use auto"
    ):
        _case(suite, suite.cases[case], "triton", torch.bfloat16)


def test_each_fault_is_caught(tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{FAULTY}")
    done = run(str(script), timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    faults = json.loads(done.stdout)
    assert faults["good"] == []
    assert any("spills" in fault for fault in faults["spills"])
    assert any("local memory" in fault for fault in faults["spills"])
    assert any("shared memory, over" in fault for fault in faults["shared memory"])
    assert faults["no wgmma"][0] == "no HGMMA" and "HMMA and wgmma" in faults["no wgmma"][1]
    assert faults["turned"] == ["loads %a in another layout than it stores it"]
    assert faults["does not compile"][0].startswith("does not compile: ")
    assert faults["traps"] == ["does not compile: the compiled program traps"]
    assert faults["cached"] == [False, True]  # the next case is compiled nevertheless
    assert [f"does not compile: {fault}" for fault in faults["uncached"]] == faults[
        "does not compile"
    ]


def test_every_kernel_is_known_by_name() -> None:
    """Kernels end in ``_kernel``, the functions they call do not; a kernel without a launch is a
    fault.
    """
    written = set()
    for path, text in python_sources().items():
        if not path.startswith("kernels/") or "triton" not in path:
            continue
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                assert [ast.unparse(each) for each in node.decorator_list] == ["triton.jit"], (
                    f"{module}.{node.name}"
                )
                written.add((module, node.name))
    assert len(written) > 20 and written == kernels_under("kernels")
    assert {name for _, name in kernels_under("kernels.conditioner_features")} == {
        "_forward_kernel",
        "_backward_kernel",
    }


@pytest.mark.slow
def test_the_shapes_are_those_of_the_models_and_the_demo() -> None:
    builds = recorded()
    values = {dict(build.constants)["DV"] for build in builds if build.kernel == "_stream_kernel"}
    assert {64, 32, 16} <= values  # head sizes at 1.3B, at 340M, and of the demo
    features = {
        dict(build.constants)["FEATURES"]
        for build in builds
        if build.module == "kernels.fem_projection.triton"
    }
    assert {64, 32, 6} <= features
    assert any(
        build.types[0] == ("reads", "*fp32")
        for build in builds
        if build.kernel == "_epilogue_kernel"
    )  # FEM over a linear prior
    attention = [
        build for build in builds if build.module.startswith("kernels.fem_attention.triton")
    ]
    assert any(build.label.endswith("documents") for build in attention)
    assert any(dict(build.types).get("valid") for build in attention)
    # Not a multiple of 16 queries.
    assert any("tq" in dict(build.types) and "tq" not in build.aligned for build in attention)


def test_few_builds_have_each_form_and_type() -> None:
    def made(label: str, width: int, causal: bool, mask: str | None) -> Build:
        types = (("q", "*bf16"), *([("valid", mask)] if mask else []))
        constants = (("D", width), ("CAUSAL", causal), *(() if mask else (("valid", None),)))
        return Build("m", "_kernel", label, types, constants, (), 4, 1)

    sizes = (
        ("a", 64, True, None),
        ("b", 64, True, "*i1"),
        ("c", 128, True, None),
        ("d", 64, False, "*i1"),
        ("e", 128, False, None),
    )
    builds = [made(*each) for each in sizes]
    assert [build.label for build in covering(builds, sizes=False)] == ["a", "d"]
    assert [build.label for build in covering(builds)] == ["a", "c", "d"]
    assert len(covering([made("one of many sizes", width, True, None) for width in range(9)])) == 9


WRONG = {
    "kernels.nothing": "no module under 'kernels.nothing' has kernels",
    "kernels.cem_attention --write": "--write is about all kernels and architectures",
    "kernels.cem_attention --check --sm 90": "--check is about all architectures and sizes",
    "--warm cache --only fem_atention": (
        "--only fem_atention: no operation of this name has kernels; did you mean fem_attention?"
    ),
}


def test_a_wrong_call_is_one_line() -> None:
    """All in one process, because each would import torch."""
    done = run(
        "-c",
        f"from tools.kernel_gate.__main__ import main\nfor words in {[*WRONG]}: assert"
        " main(words.split()) == 2",
    )
    assert done.returncode == 0, done.stderr
    assert all(
        message in line
        for message, line in zip(WRONG.values(), done.stderr.splitlines(), strict=True)
    )


@pytest.mark.slow
def test_a_warm_cache_has_what_the_jit_asks_for(tmp_path: Path) -> None:
    """Bool pointers, lengths that are no multiples of 16; from the archive only, at the path for
    which it was packed.
    """
    made, there = tmp_path / "made", tmp_path / "there"
    done = run("-c", CACHED, "fill", str(made), str(there))
    assert done.returncode == 0, done.stderr[-2000:]
    with tarfile.open(tmp_path / "made.tgz") as archive:
        assert {Path(name).suffix for name in archive.getnames()} == {".cubin", ".json"}
        archive.extractall(there, filter="data")
    made.rename(tmp_path / "gone")
    done = run("-c", CACHED, "ask", TRITON_CACHE_DIR=str(there))
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.lower()) == [True, True, True, False]


@pytest.mark.slow
def test_an_operation_s_cache_is_packed_for_another_path(tmp_path: Path) -> None:
    done = run(
        "-m",
        "tools.kernel_gate",
        "--warm",
        str(tmp_path / "cache"),
        "--only",
        "conditioner_features",
        "--at",
        "/there",
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with tarfile.open(tmp_path / "cache.tgz") as archive:
        groups = []
        for name in archive.getnames():
            content = archive.extractfile(name) if "__grp__" in name else None
            if content:
                groups.append(json.load(content))
    # Kernels of layers and of cases, in both dtypes.
    assert len(groups) > 12 and f"{len(groups)} kernels for sm_90" in done.stdout
    assert all(
        path.startswith("/there/") for group in groups for path in group["child_paths"].values()
    )


def test_the_key_of_triton_for_another_python(tmp_path: Path) -> None:
    """Its compiled library is part of the key, because another version compiles other code."""
    triton = pytest.importorskip("triton")
    from triton.runtime.cache import triton_key

    library = tmp_path / "triton" / "_C" / "libtriton.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"another")
    info = tmp_path / "triton.dist-info" / "METADATA"
    info.parent.mkdir()
    info.write_text(f"Name: triton\nVersion: {triton.__version__}\n")
    with (Path(triton.__file__).parent / "_C" / "libtriton.so").open("rb") as stream:
        own = hashlib.file_digest(stream, "sha256").hexdigest()
    assert (
        key_of(tmp_path)
        == triton_key().replace(own, hashlib.sha256(b"another").hexdigest())
        != triton_key()
    )
    info.write_text("Name: triton\nVersion: 3.5.1\n")
    with pytest.raises(UserError, match=r"has Triton 3\.5\.1, and .* compiles here"):
        key_of(tmp_path)
    library.unlink()
    with pytest.raises(UserError, match="has no Triton: pip install"):
        key_of(tmp_path)
