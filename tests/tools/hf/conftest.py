"""Exported folders shared by the tests of this package: each is written and loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.one_process import megatron_of_one_process
from tests.tools.hf.runs import copy as copy
from tests.tools.hf.runs import exports as exports
from tests.tools.hf.runs import runs as runs
from tests.tools.hf.small import Exported, Exports, config_of, export, random_state
from tests.tools.refusals import raised as raised
from tests.tools.refusals import refused as refused
from tools.hf.stock import why_not_stock


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Megatron-core's process groups in this process."""
    with megatron_of_one_process():
        yield


@pytest.fixture(scope="session")
def open_folder() -> Callable[..., Any]:
    """Load a folder as an external user does: AutoModelForCausalLM, code from the folder."""
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM

    def load(path: Path | str, **options: Any) -> Any:
        folder = Path(path)
        model, info = loader.from_pretrained(
            folder, trust_remote_code=True, output_loading_info=True, **options
        )
        assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
        ours = (folder / "modeling_fem.py").exists()
        assert type(model).__module__.startswith(
            "transformers_modules." if ours else "transformers.models."
        )
        return model.eval()

    return load


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, open_folder: Callable[..., Any]) -> Exports:
    """Exported and loaded model for a name of NAMES."""
    known: dict[str, Exported] = {}

    def of(name: str) -> Exported:
        if name not in known:
            config = config_of(name)
            state = random_state(config)
            # The same last folder name for all, so that transformers must distinguish them by their
            # contents.
            folder = export(config, tmp_path_factory.mktemp(name) / "model", state=state)
            assert (folder / "modeling_fem.py").exists() == (why_not_stock(config) is not None)
            known[name] = Exported(config, state, folder, open_folder(folder))
        return known[name]

    return of
