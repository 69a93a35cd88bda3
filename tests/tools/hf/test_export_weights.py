"""The weights' way through ``tools.hf export``: read as Megatron reads them, written bit for bit, a tensor at a time."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fem_common.errors import ConfigError
from fem_megatron.config import ModelConfig
from fem_megatron.megatron import platform
from pretrain.checkpoint.reader import Weights
from pretrain.config import DataConfig
from pretrain.plan.run_plan import parameter_shapes
from tests.tools.hf.checkpoints import equal, hf, tensors, weights
from tests.tools.hf.runs import LENGTH, files, made, run_of, step_of, write_checkpoint
from tests.tools.hf.small import random_state, small
from tools.hf import folder as shards
from tools.hf.folder import Held, byte_count, write_shards
from tools.hf.recipes import to_fem
from tools.hf.stock import to_stock

ROOT = Path(__file__).parents[3]


# ---------------------------------------------------------------- reading


def test_weights_are_what_megatron_reads(runs: dict[str, Path]) -> None:
    """Of parts and of whole tensors, the same names, types and bits; any number at a time, in any order."""
    from megatron.core import dist_checkpointing

    for name in ("fem_softmax", "fem_gla"):
        step = step_of(runs[name])
        platform.initialize_distributed()
        wanted = {key: tensor.without_data() for key, tensor in dist_checkpointing.load_tensors_metadata(str(step)).items()}
        theirs = dist_checkpointing.load(dict(wanted), str(step), validate_access_integrity=False)
        torch.distributed.destroy_process_group()
        found = Weights(step)
        assert found.shapes == {key: tuple(theirs[key].shape) for key in wanted}
        assert found.dtypes == {key: theirs[key].dtype for key in wanted}
        equal(found.read(sorted(wanted, reverse=True)), {key: theirs[key] for key in sorted(wanted, reverse=True)})


def rewritten(step: Path, change: Callable[[Any], None]) -> None:
    """``.metadata`` as somebody changed it, with its recorded size and hash put right."""
    metadata = pickle.loads((step / ".metadata").read_bytes())
    change(metadata)
    content = pickle.dumps(metadata)
    (step / ".metadata").write_bytes(content)
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["files"][".metadata"] = len(content)
    manifest["sha256"][".metadata"] = hashlib.sha256(content).hexdigest()
    (step / "manifest.json").write_text(json.dumps(manifest))


def test_parts_that_do_not_fit_are_refused(copy: Path) -> None:
    """A part that is missing would leave memory as it was; a path out of the folder would read anything."""
    name, step = "decoder.layers.0.mixer.out_proj.weight", step_of(copy)
    whole = (step / ".metadata").read_bytes()

    def lose_a_part(metadata: Any) -> None:
        del metadata.state_dict_metadata[name].chunks[0]

    def lose_a_place(metadata: Any) -> None:
        del metadata.storage_data[next(key for key in metadata.storage_data if key.fqn == name)]

    def go_elsewhere(metadata: Any) -> None:
        place = metadata.storage_data[next(key for key in metadata.storage_data if key.fqn == name)]
        place.relative_path = f"../{step.name}/{place.relative_path}"

    def swap_places(metadata: Any) -> None:
        ours, other = (next(key for key in metadata.storage_data if key.fqn == n) for n in (name, "embedding.word_embeddings.weight"))
        metadata.storage_data[ours] = metadata.storage_data[other]

    for change, message in (
        (lose_a_part, "its parts are not the whole"),
        (lose_a_place, "no file of the folder holds it"),
        (go_elsewhere, "no file of the folder holds it"),
        (swap_places, "holds another tensor in its place"),
    ):
        (step / ".metadata").write_bytes(whole)
        rewritten(step, change)
        with pytest.raises(ConfigError, match=f"{name}: .*{message}"):
            weights(step)


# ---------------------------------------------------------------- the weights' files


@pytest.mark.parametrize("name", ["fem_softmax", "transformer", "fem_gla"])
def test_the_folder_holds_the_weights_bit_for_bit(runs: dict[str, Path], tmp_path: Path, name: str) -> None:
    """And every file is the one that the safetensors library writes of its tensors."""
    model = small(name, num_query_groups=2) if name == "transformer" else small(name)
    state = random_state(model, dtype=torch.bfloat16 if name == "fem_gla" else torch.float32)
    assert hf("export", runs[name], tmp_path / "one") == 0
    assert hf("export", runs[name], tmp_path / "many", "--max-shard-size", "9KB") == 0
    wanted = {key: tensor.contiguous() for key, tensor in made(state, model).items()}
    equal(tensors(tmp_path / "one"), wanted)
    equal(tensors(tmp_path / "many"), wanted)
    save_file(wanted, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    held = {file.name: tensors_of(file) for file in sorted((tmp_path / "many").glob("*.safetensors"))}
    assert index["weight_map"] == {key: file for file, keys in held.items() for key in keys} and len(held) > 3
    # A file over the limit has one tensor alone: the embedding is larger than a file may be.
    for keys in held.values():
        assert sum(wanted[key].nbytes for key in keys) <= 9000 or len(keys) == 1
    kept = {"model.safetensors", "model.safetensors.index.json", *held}
    one, many = files(tmp_path / "one"), files(tmp_path / "many")
    assert {key: one[key] for key in one.keys() - kept} == {key: many[key] for key in many.keys() - kept}


def tensors_of(file: Path) -> list[str]:
    length = int.from_bytes(file.read_bytes()[:8], "little")
    return [name for name in json.loads(file.read_bytes()[8 : 8 + length]) if name != "__metadata__"]


def test_another_type(runs: dict[str, Path], tmp_path: Path) -> None:
    for name, told, dtype in (("fem_softmax", "bfloat16", torch.bfloat16), ("fem_gla", "float32", torch.float32)):
        assert hf("export", runs[name], tmp_path / name, "--dtype", told) == 0
        equal(tensors(tmp_path / name), {key: tensor.to(dtype) for key, tensor in made(weights(runs[name]), small(name)).items()})
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == told


def test_large_tensors_change_their_type_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that do not divide the tensors, and a source that is not contiguous."""
    monkeypatch.setattr(shards, "PIECE", 7)
    model = small("transformer", tie_embeddings=True)
    state = random_state(model, dtype=torch.float32)
    write_shards(Held(state), to_stock(model), tmp_path, torch.bfloat16, 10**9, lambda done, total: None)
    equal(tensors(tmp_path), {key: tensor.bfloat16() for key, tensor in made(state, model).items()})


# ---------------------------------------------------------------- memory


# What the process held before is measured when all is imported; writing 5 there starts the count of its largest resident set anew.
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


def peak_of_export(model: ModelConfig, root: Path, shard: int) -> tuple[int, int, int]:
    """(bytes of the whole model, of its largest tensor, what a process of its own held at most while exporting, above what it held)."""
    config = replace(run_of(model, root / "data"), data=DataConfig(seq_length=LENGTH))
    state = {name: torch.zeros(shape).uniform_() for name, shape in parameter_shapes(model).items()}
    step = write_checkpoint(root / "run" / "checkpoints", config, state)
    command = [sys.executable, "-c", MEASURE, "export", str(step), str(root / "out"), "--max-shard-size", str(shard)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    sizes = [tensor.nbytes for tensor in state.values()]
    return sum(sizes), max(sizes), int(done.stdout.split()[-1])


# hidden_size, num_attention_heads, num_layers, ffn_hidden_size, vocab_size; bytes of a file.
SIZES = {
    "110 MB": ((384, 6, 8, 1536, 8000), 20_000_000),
    "1 GB": ((1024, 8, 12, 4096, 32_000), 200_000_000),
    "an embedding larger than a shard": ((512, 8, 4, 1024, 200_000), 200_000_000),
}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of a process can be reset on Linux alone")
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("transformer", "110 MB"),
        *(pytest.param(name, size, marks=pytest.mark.slow) for name in ("fem_softmax", "transformer") for size in [*SIZES][1:]),
    ],
)
def test_memory_is_a_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, size: str) -> None:
    """The process's peak above what it held: at most 1.3 x one shard and one tensor."""
    sizes, shard = SIZES[size]
    names = ("hidden_size", "num_attention_heads", "num_layers", "ffn_hidden_size", "vocab_size")
    total, largest, peak = peak_of_export(small(name, **dict(zip(names, sizes, strict=True))), tmp_path, shard)
    with capsys.disabled():
        told = f"{total / 1e6:.0f} MB in files of {shard / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB"
        print(f"\n{name}, {told}: peak {peak / 1e6:.0f} MB")
    assert peak <= 1.3 * shard + largest < total


class Counted:
    """A source that knows how many bytes of what it gave are still held."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state, self.shapes = state, {name: tuple(tensor.shape) for name, tensor in state.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in state.items()}
        self.alive: dict[int, tuple[Any, int]] = {}
        self.most, self.reads = 0, 0

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        given = {name: self.state[name].clone() for name in names}
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not torch.UntypedStorage._expired(ref)}
        for tensor in given.values():
            ref: Any = tensor.untyped_storage()._weak_ref()
            self.alive[ref] = (ref, tensor.nbytes)
        self.reads += len(given)
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return given


@pytest.mark.parametrize("name", ["fem_mamba", "transformer", "cem"])
def test_one_source_is_held_at_a_time(tmp_path: Path, name: str) -> None:
    model = small(name)
    source = Counted(random_state(model, dtype=torch.float32))
    recipes = to_stock(model) if name == "transformer" else to_fem(model)
    write_shards(source, recipes, tmp_path, torch.float32, 9000, lambda done, total: None)
    assert source.most == max(tensor.nbytes for tensor in source.state.values())
    assert source.reads <= len(recipes)


def test_sizes() -> None:
    for text, size in (("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("200MiB", 200 * 2**20), ("123", 123), (7, 7)):
        assert byte_count(text) == size
    for bad in ("", "GB", "-1GB", "0", "5 apples", "0.1B", "1e9"):
        with pytest.raises(ValueError, match="is no size of a file: write it as 5GB"):
            byte_count(bad)
