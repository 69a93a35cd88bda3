"""Tests of weights in ``tools.hf export``: read as by Megatron, written bit for bit, one tensor at
a time.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fem_common.progress import Progress
from fem_megatron.megatron import platform
from pretrain.checkpoint.reader import Weights
from pretrain.config import DataConfig
from pretrain.plan.run_plan import parameter_shapes
from tests.tools.hf.checkpoints import equal, hf, tensors, weights
from tests.tools.hf.runs import (
    LENGTH,
    RUNS,
    Folders,
    edit_manifest,
    files,
    made,
    model_of,
    run_of,
    step_of,
    write_checkpoint,
)
from tests.tools.hf.small import Held, random_state, small
from tests.tools.refusals import Refused
from tools.checkpoint.__main__ import main as checkpoint
from tools.hf import folder as shards
from tools.hf.folder import byte_count, json_object, write_shards
from tools.hf.stock import exported

MEASURE = """
import sys
from pathlib import Path
import tools.hf.export
from fem_megatron.megatron.platform import peak_resident_bytes
from tools.hf.__main__ import main
Path("/proc/self/clear_refs").write_text("5")
before = peak_resident_bytes()
code = main(sys.argv[1:])
print(peak_resident_bytes() - before)
sys.exit(code)
"""

ROOT = Path(__file__).parents[3]


def test_weights_are_what_megatron_reads(runs: Folders) -> None:
    """Equal names, dtypes and bits, for any number at a time in any order. test_layouts.py tests
    weights of several ranks.
    """
    from megatron.core import dist_checkpointing

    for name in ("fem_softmax", "fem_gla"):
        step = step_of(runs[name])
        platform.initialize_distributed()
        wanted = {
            key: tensor.without_data()
            for key, tensor in dist_checkpointing.load_tensors_metadata(str(step)).items()
        }
        theirs = dist_checkpointing.load(dict(wanted), str(step), validate_access_integrity=False)
        torch.distributed.destroy_process_group()
        found = Weights(step)
        assert found.shapes == {key: tuple(theirs[key].shape) for key in wanted}
        assert found.dtypes == {key: theirs[key].dtype for key in wanted}
        equal(found.read(sorted(wanted, reverse=True)), {key: theirs[key] for key in wanted})


NAME = "decoder.layers.0.mixer.out_proj.weight"


def place(metadata: Any, name: str = NAME) -> Any:
    """Return the index of the first part of a tensor."""
    return next(key for key in metadata.storage_data if key.fqn == name)


PARTS = {
    "a part is missing": lambda found: found.state_dict_metadata[NAME].chunks.pop(0),
    "a place is missing": lambda found: found.storage_data.pop(place(found)),
    "out of the folder": lambda found: setattr(
        found.storage_data[place(found)], "relative_path", "../step_00000012/__0_0.distcp"
    ),
    "another tensor": lambda found: found.storage_data.update(
        {place(found): found.storage_data[place(found, "embedding.word_embeddings.weight")]}
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_that_do_not_fit_are_refused(copy: Path, raised: Refused, case: str) -> None:
    """A missing part would leave memory uninitialised; a path outside the folder would read any
    file. Sizes and hashes match.
    """
    step = step_of(copy)
    metadata = pickle.loads((step / ".metadata").read_bytes())
    PARTS[case](metadata)
    content = pickle.dumps(metadata)
    (step / ".metadata").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    edit_manifest(copy, lambda manifest: manifest["files"].update({".metadata": len(content)}))
    edit_manifest(copy, lambda manifest: manifest["sha256"].update({".metadata": digest}))
    raised(weights, step)


@pytest.mark.parametrize("name", RUNS)
def test_the_folder_holds_the_weights_bit_for_bit(
    runs: Folders, exports: Folders, tmp_path: Path, name: str
) -> None:
    """Every file equals the one that the safetensors library writes for its tensors; in another
    dtype, the same numbers rounded.
    """
    model = model_of(name)
    full = exports[name]
    many = tmp_path / "many"
    wanted = made(random_state(model, dtype=RUNS[name]), model)
    equal(tensors(full), wanted)
    save_file(wanted, tmp_path / "theirs", metadata={"format": "pt"})
    assert (full / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert hf("export", runs[name], many, "--max-shard-size", "9KB") == 0
    equal(tensors(many), wanted)
    assert checkpoint(["verify", str(full)]) == 0 == checkpoint(["verify", str(many)])
    index = json_object(many / "model.safetensors.index.json")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    held = {file.name: [*shards.header(file)] for file in sorted(many.glob("*.safetensors"))}
    assert index["weight_map"] == {key: file for file, keys in held.items() for key in keys}
    assert len(held) > 3
    # A file over the limit contains only one tensor: the embedding is larger than the limit.
    for keys in held.values():
        assert len(keys) == 1 or sum(wanted[key].nbytes for key in keys) <= 9000

    def others(folder: Path) -> dict[str, str]:
        return {key: digest for key, digest in files(folder).items() if ".safetensors" not in key}

    assert others(full) == others(many) and len(others(full)) > 4
    report, dtype = (
        ("float32", torch.float32) if name == "fem_gla" else ("bfloat16", torch.bfloat16)
    )
    assert hf("export", runs[name], tmp_path / "cast", "--dtype", report) == 0
    equal(tensors(tmp_path / "cast"), {key: tensor.to(dtype) for key, tensor in wanted.items()})
    assert json_object(tmp_path / "cast" / "config.json")["dtype"] == report


def test_large_tensors_change_their_type_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that do not divide the tensors, and a source that is not contiguous."""
    monkeypatch.setattr(shards, "PIECE", 7)
    model = small("transformer", tie_embeddings=True)
    state = random_state(model)
    weights = exported(Held(state), model)
    write_shards(weights, tmp_path, torch.bfloat16, 10**9, Progress(None, "", quiet=True))
    equal(tensors(tmp_path), {key: tensor.bfloat16() for key, tensor in made(state, model).items()})


class Counted(Held):
    """A source that counts the bytes of its tensors that are still alive."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__(state)
        self.alive: list[tuple[Any, int]] = []
        self.most, self.reads = 0, 0

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        given = {name: tensor.clone() for name, tensor in super().read(names).items()}
        self.alive = [
            (reference, size)
            for reference, size in self.alive
            if not torch.UntypedStorage._expired(reference)
        ]
        self.alive += [
            (tensor.untyped_storage()._weak_ref(), tensor.nbytes) for tensor in given.values()
        ]
        self.reads += len(given)
        self.most = max(self.most, sum(size for _, size in self.alive))
        return given


@pytest.mark.parametrize("name", ["fem_mamba", "transformer", "cem"])
def test_one_source_is_held_at_a_time(tmp_path: Path, name: str) -> None:
    model = small(name)
    state = random_state(model)
    source = Counted(state)
    weights = exported(source, model)
    write_shards(weights, tmp_path, torch.float32, 9000, Progress(None, "", quiet=True))
    assert source.most == max(tensor.nbytes for tensor in state.values())
    assert source.reads <= len(weights.shapes)


def test_sizes() -> None:
    for text, size in (
        ("5GB", 5 * 10**9),
        ("1.5 mb", 1_500_000),
        ("200MiB", 200 * 2**20),
        ("123", 123),
        (7, 7),
    ):
        assert byte_count(text) == size
    for bad in ("", "GB", "-1GB", "0", "5 apples", "0.1B", "1e9"):
        with pytest.raises(ValueError, match="is not a file size: write it as 5GB"):
            byte_count(bad)


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="the peak of a process can be reset on Linux alone",
)
def test_memory_is_a_shards(tmp_path: Path) -> None:
    """110 MB in files of 20 MB: the additional peak memory of the process is at most 1.3 x one
    shard and one tensor.
    """
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "num_layers": 8}
    model = small("transformer", **sizes, ffn_hidden_size=1536, vocab_size=8000)
    shard = 20e6
    config = replace(run_of(model, tmp_path / "data"), data=DataConfig(seq_length=LENGTH))
    state = {name: torch.zeros(shape).uniform_() for name, shape in parameter_shapes(model).items()}
    step = write_checkpoint(tmp_path / "run", config, state)
    words = f"export {step} {tmp_path / 'out'} --max-shard-size {shard:.0f}".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    held = [tensor.nbytes for tensor in state.values()]
    assert int(done.stdout.split()[-1]) <= 1.3 * shard + max(held) < sum(held)
