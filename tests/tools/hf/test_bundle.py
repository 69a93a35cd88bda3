"""Tests of the exported code: flat imports that transformers' loader follows, no unneeded files, no
false requirements.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from transformers.dynamic_module_utils import check_imports, get_imports, get_relative_import_files

from fem_megatron import catalogue
from fem_megatron.config import ModelConfig
from tools.hf.bundle import BundleError, bundle, flatten, packages

NAMES = list(catalogue.MIXERS)
MODULE = "fem_megatron.block"


def files_of(name: str, **changes: Any) -> dict[str, str]:
    return bundle(
        ModelConfig(
            mixer=name, hidden_size=64, num_attention_heads=4, num_layers=2, **changes
        ).blocks()
    )


def write(files: dict[str, str], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def checked() -> set[tuple[str, str]]:
    """Names and texts of files that have passed: most mixers share most of them."""
    return set()


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("fla.")])
def test_every_mixers_files(name: str, checked: set[tuple[str, str]], tmp_path: Path) -> None:
    """transformers finds exactly these files and requires only torch and itself; no reference to
    this project remains.
    """
    files = files_of(name)
    # Without flash-linear-attention, which is not installed, every folder runs.
    assert packages(files) == []
    folder = write(files, tmp_path)
    found = {Path(file).name for file in get_relative_import_files(folder / "modeling_fem.py")}
    assert found | {"modeling_fem.py"} == files.keys()
    for file in [file for file, text in files.items() if (file, text) not in checked]:
        check_imports(folder / file)
        for node in ast.walk(ast.parse(files[file])):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            )
            assert not {module.split(".")[0] for module in modules} & {
                "fem_megatron",
                "kernels",
                "tools",
                "pretrain",
                "megatron",
            }
        checked.add((file, files[file]))
    configuration = {
        Path(file).name for file in get_relative_import_files(folder / "configuration_fem.py")
    }
    assert not any(
        part in file for file in configuration for part in ("layer", "priors", "kernels")
    )


def test_a_model_takes_what_it_needs() -> None:
    attention, fem = files_of("transformer"), files_of("fem_softmax")
    both = files_of("fem_softmax", pattern=("fem_softmax", "transformer"))
    assert "fem_megatron_mixers_fem_layer.py" not in attention
    assert "fem_megatron_mixers_attention_layer.py" not in fem
    assert {
        "fem_megatron_mixers_fem_layer.py",
        "fem_megatron_mixers_attention_layer.py",
    } <= both.keys()
    assert {"fem_megatron_mixers_fem_priors.py", "kernels_time_decay_scan.py"} <= fem.keys()
    assert len({files["configuration_fem.py"] for files in (attention, fem, both)}) == 3
    assert both == files_of("transformer", pattern=("fem_softmax", "transformer"))


@pytest.mark.parametrize(
    ("text", "flat"),
    [
        (
            "from kernels.time_decay_scan import time_decay_scan as scan",
            "from .kernels_time_decay_scan import time_decay_scan as scan",
        ),
        (
            "from fem_megatron.update import (\n    Context,\n    Layer,\n)",
            "from .fem_megatron_update import Context, Layer",
        ),
        ("from .update import Context", "from .fem_megatron_update import Context"),
        ("from fem_common.settings import setting", "from .fem_common_settings import setting"),
        (
            "def f():\n    from kernels.time_decay_scan import x\n    return x",
            "def f():\n    from .kernels_time_decay_scan import x\n    return x",
        ),
        (
            "from fem_megatron import catalogue as c",
            (
                "from .fem_megatron_catalogue import __name__ as _\nfrom . import"
                " fem_megatron_catalogue as c"
            ),
        ),
        ("import torch, math\nfrom torch import nn", "import torch, math\nfrom torch import nn"),
        ("import triton", "try:\n    import triton\nfinally:\n    pass"),
        (
            "try:\n    import triton\nexcept ImportError:\n    triton = None",
            "try:\n    import triton\nexcept ImportError:\n    triton = None",
        ),
        (
            "x = 'a\u2028b'\nfrom .update import y",
            "x = 'a\u2028b'\nfrom .fem_megatron_update import y",
        ),
    ],
)
def test_imports_become_flat(text: str, flat: str) -> None:
    assert flatten(MODULE, text)[0] == flat


def test_wanted_modules() -> None:
    text = (
        "from fem_megatron import catalogue\nfrom kernels.fem_attention import"
        " fem_attention\nimport torch"
    )
    assert set(flatten(MODULE, text)[1]) == {"fem_megatron.catalogue", "kernels.fem_attention"}
    inside = flatten("kernels.fem_attention", "from .reference import reference_attention")
    assert inside == (
        "from .kernels_fem_attention_reference import reference_attention",
        frozenset({"kernels.fem_attention.reference"}),
    )
    with pytest.raises(BundleError, match=r"fem_megatron.block, line 2: only `from"):
        flatten(MODULE, "import torch\nimport kernels.fem_attention")
    for module in ("kernels.no_such", "pretrain.plan.run_plan", "tools.demo.report"):
        with pytest.raises(
            BundleError, match=f"line 1: {module} is not a file that an export may copy"
        ):
            flatten(MODULE, f"from {module} import x")


def test_an_outside_package_is_no_requirement(tmp_path: Path) -> None:
    """The import still fails at the same place."""
    flat, _ = flatten(
        MODULE,
        "import math\ndef f():\n    if math.pi:\n        from no_such.layers import a, b as c\n   "
        " return a",
    )
    (tmp_path / "a.py").write_text(flat)
    assert get_imports(tmp_path / "a.py") == ["math"]
    assert packages(
        {"a.py": flat, "b.py": "import torch.nn, triton\nimport os\nfrom fla.ops import gla"}
    ) == ["no_such"]
    names: dict[str, Any] = {}
    exec(compile(flat, "a.py", "exec"), names)
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        names["f"]()
