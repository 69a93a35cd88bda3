"""``tools.hf export`` as a user meets it: complete or not there at all, the same bytes every time, every mistake in one line."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fem_megatron.catalogue import MIXERS
from pretrain.checkpoint.reader import Weights
from pretrain.plan.run_plan import flops_per_token
from tests.tools.hf.checkpoints import hf, tensors
from tests.tools.hf.runs import LENGTH, SAMPLES, STEP, files, run_of, step_of
from tests.tools.hf.small import VOCAB, small, write_tokenizer
from tools.hf.model_card import BIBTEX, REFERENCES, TESTED

ROOT = Path(__file__).parents[3]


# ---------------------------------------------------------------- what else is in the folder


def test_the_same_bytes_every_time(runs: dict[str, Path], tmp_path: Path) -> None:
    """In this process, and by the command itself, elsewhere, with another order of Python's sets and no GPU."""
    for name in ("fem_softmax", "transformer"):
        assert hf("export", runs[name], tmp_path / name) == 0
    environment = {**os.environ, "PYTHONHASHSEED": "7", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    code = "import sys; from tools.hf.__main__ import main; sys.exit(main(sys.argv[1:4]) or main(sys.argv[4:]))"
    again = [argument for name in ("fem_softmax", "transformer") for argument in ("export", runs[name], tmp_path / "again" / "deep" / name)]
    done = subprocess.run([sys.executable, "-c", code, *again], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.splitlines()[1].endswith(f"from_pretrained('{again[-1]}') loads it")
    for name in ("fem_softmax", "transformer"):
        first, second = files(tmp_path / name), files(tmp_path / "again" / "deep" / name)
        assert first == second and len(first) > 6
        modes = {file.stat().st_mode & 0o777 for file in (tmp_path / name).iterdir()}
        assert len(modes) == 1


def test_a_transformer_needs_no_code(runs: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    assert hf("export", runs["transformer"], tmp_path / "out") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not list((tmp_path / "out").glob("*.py")) and "auto_map" not in config
    assert (config["architectures"], config["dtype"], config["max_position_embeddings"]) == (["LlamaForCausalLM"], "float32", LENGTH)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (None, 0, 0)
    loader: Any = AutoModelForCausalLM
    model, told = loader.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model) is LlamaForCausalLM and not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "trust_remote_code" not in card and "transformers' own `LlamaForCausalLM`" in card


def test_what_is_told_of_the_training(runs: dict[str, Path], tmp_path: Path) -> None:
    """Numbers that are computed here once more."""
    assert hf("export", runs["fem_softmax"], tmp_path / "out") == 0
    manifest = json.loads((step_of(runs["fem_softmax"]) / "manifest.json").read_text())
    training = json.loads((tmp_path / "out" / "training.json").read_text())
    assert training == {
        "format": 1,
        "config": manifest["config"],
        "progress": {"step": STEP, "consumed_samples": SAMPLES, "order_samples": 2 * SAMPLES, "skipped_steps": 0, "bad_steps_in_a_row": 0},
        "data": "data-key",
        "heldout_loss": 3.0,
    }
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "checkpoints").symlink_to(runs["fem_softmax"] / "checkpoints")  # as runs/demo names the demo's model
    assert hf("export", tmp_path / "link", tmp_path / "out", "--overwrite") == 0
    assert json.loads((tmp_path / "out" / "training.json").read_text()) == training
    config = run_of(small("fem_softmax"), runs["data"])
    tokens = SAMPLES * LENGTH
    card = (tmp_path / "out" / "README.md").read_text()
    for row in (
        "| Data | `data/train` (75% of the blend, 900 tokens); `data/other` (25% of the blend) |",
        f"| Tokens seen | {tokens:,} |",
        f"| Optimizer steps | {STEP} |",
        "| Tokens a step | 128 |",
        f"| Context length | {LENGTH} |",
        "| Optimizer | AdamW, lr 0.001 to 0.0001 (cosine), weight decay 0.1 |",
        "| Precision | fp32 |",
        "| Held-out loss (nats per token) | 3.0000 |",
        f"| Held-out bits per byte | {3.0 / math.log(2) / 4:.4f} |",  # the data's manifest says four bytes a token
    ):
        assert f"\n{row}\n" in card, row
    per_token, all_of_them = (float(found) for found in re.findall(r"Training FLOPs.* \| (\S+) \|", card))
    assert per_token == pytest.approx(flops_per_token(config), rel=1e-3) and all_of_them == pytest.approx(per_token * tokens, rel=1e-3)
    parameters = sum(tensor.numel() for tensor in tensors(tmp_path / "out").values())
    assert f" of {parameters:,} parameters " in card and "[training.json](training.json)" in card
    assert f"transformers {TESTED[0]} to {TESTED[1]}" in card and "trust_remote_code=True" in card and BIBTEX["Free Energy Mixer"] in card
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation.pop("transformers_version") and generation == {"eos_token_id": 0, "pad_token_id": 0}


def test_little_is_known(copy: Path, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without data, log and tokenizer: an export all the same, which says nothing that nobody knows."""
    manifest = json.loads((step_of(copy) / "manifest.json").read_text())
    manifest["config"]["data"] |= {"train": [], "valid": [], "tokenizer": None}
    manifest["progress"] |= {"step": 0, "consumed_samples": 0}
    (step_of(copy) / "manifest.json").write_text(json.dumps(manifest))
    (copy / "metrics.jsonl").unlink()
    assert hf("export", copy, tmp_path / "out") == 0
    told = capsys.readouterr()
    assert told.err == "tools.hf: note: the checkpoint names no tokenizer, so none is exported; name one with --tokenizer DIR\n"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Tokens seen" not in card and "FLOPs" not in card and "Held-out" not in card and "tokenizer" not in card
    assert json.loads((tmp_path / "out" / "training.json").read_text())["heldout_loss"] is None
    shutil.copytree(runs["data"] / "tokenizer", copy / "checkpoints" / "tokenizer")  # where an import has it
    manifest["heldout_loss"] = 2.25
    (step_of(copy) / "manifest.json").write_text(json.dumps(manifest))
    assert hf("export", copy, tmp_path / "out", "--overwrite") == 0
    assert (tmp_path / "out" / "tokenizer.json").is_file() and "| 2.2500 |" in (tmp_path / "out" / "README.md").read_text()
    assert not capsys.readouterr().err


def test_every_mixers_paper_can_be_cited() -> None:
    for name, mixer in MIXERS.items():
        assert (mixer.paper in BIBTEX) + (mixer.paper in REFERENCES) == (mixer.package is None), name
    for entry in BIBTEX.values():
        assert re.match(r"@\w+\{\w+,\n", entry) and entry.count("{") == entry.count("}") and "  title" in entry


def test_of_a_tokenizers_folder_its_files_alone_go_along(runs: dict[str, Path], tmp_path: Path) -> None:
    """It may be a whole model's folder, with weights and code."""
    folder = tmp_path / "model"
    shutil.copytree(runs["data"] / "tokenizer", folder)
    others = (
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "modeling_x.py",
        "README.md",
        "training.json",
    )
    for name in others:
        (folder / name).write_text('{"theirs": 1}')
    (folder / "merges.txt").write_text("a b\n")
    assert hf("export", runs["transformer"], tmp_path / "out", "--tokenizer", folder) == 0
    assert (tmp_path / "out" / "merges.txt").read_text() == "a b\n"
    assert not [name for name in others if (tmp_path / "out" / name).is_file() and "theirs" in (tmp_path / "out" / name).read_text()]
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_input_names"] == ["input_ids", "attention_mask"]


# ---------------------------------------------------------------- mistakes


def damage_manifest(key: str | None) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        file = step_of(run) / "manifest.json"
        if key is None:
            file.unlink()
        else:
            manifest = json.loads(file.read_text())
            del manifest[key]
            file.write_text(json.dumps(manifest))

    return damage


def scribble(run: Path) -> None:
    """Sizes as they were, zeros where a tensor was."""
    for file in step_of(run).glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))


def drop_distcp(run: Path) -> None:
    next(step_of(run).glob("*.distcp")).unlink()


def cut_distcp(run: Path) -> None:
    file = next(step_of(run).glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


def set_model(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        file = step_of(run) / "manifest.json"
        manifest = json.loads(file.read_text())
        manifest["config"]["model"] |= changes
        file.write_text(json.dumps(manifest))

    return change


def other_tokenizer(entries: int) -> Callable[[Path], None]:
    return lambda run: [write_tokenizer(run.parent / "tokenizer", entries)].clear()


def a_thesis(run: Path) -> None:
    (run.parent / "thesis").mkdir()
    (run.parent / "thesis" / "last.tex").touch()


def nothing(run: Path) -> None:
    pass


# What is done to the run directory RUN, in tmp_path; the command's arguments; what the line says.
MISTAKES: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "no such path": (nothing, ["GONE", "OUT"], "there is no checkpoint "),
    "a file": (nothing, ["STEP/manifest.json", "OUT"], "is a file: a checkpoint is a folder step_NNNNNNNN"),
    "an empty folder": (lambda run: (run.parent / "empty").mkdir(), ["TMP/empty", "OUT"], "no checkpoint there; expected a folder step_"),
    "no manifest": (damage_manifest(None), ["STEP", "OUT"], "manifest.json is missing"),
    "no manifest in the run": (damage_manifest(None), ["RUN", "OUT"], "no good checkpoint there: "),
    "no configuration": (damage_manifest("config"), ["STEP", "OUT"], "manifest.json has no config"),
    "no progress": (damage_manifest("progress"), ["RUN", "OUT"], "manifest.json has no progress"),
    "half a directory": (drop_distcp, ["STEP", "OUT"], ".distcp is missing"),
    "half a file": (cut_distcp, ["RUN", "OUT"], " bytes instead of "),
    "zeros": (scribble, ["RUN", "OUT"], "is damaged: "),
    "no .metadata": (lambda run: (step_of(run) / ".metadata").unlink(), ["RUN", "OUT"], ".metadata is missing"),
    "an unknown key": (set_model(no_such_key=1), ["RUN", "OUT"], "no_such_key"),
    "another model": (set_model(num_layers=3), ["RUN", "OUT"], "the checkpoint lacks decoder.layers.2."),
    "another shape": (set_model(ffn_hidden_size=64), ["RUN", "OUT"], "in the checkpoint, (2, 64, 32) by its configuration"),
    "no vocabulary": (set_model(vocab_size=None), ["RUN", "OUT"], "model.vocab_size is not known"),
    "another package's layer": (
        set_model(mixer="fla.GatedLinearAttention"),
        ["RUN", "OUT"],
        "model.mixer=fla.GatedLinearAttention is another package's layer",
    ),
    "a tokenizer too large": (
        other_tokenizer(VOCAB + 1),
        ["RUN", "OUT", "--tokenizer", "TMP/tokenizer"],
        "has 51 entries, the model's vocabulary only 50: not its own",
    ),
    "another tokenizer": (other_tokenizer(VOCAB - 1), ["RUN", "OUT", "--tokenizer", "TMP/tokenizer"], "49 entries) is not the one that "),
    "no tokenizer": (nothing, ["RUN", "OUT", "--tokenizer", "RUN"], "is no tokenizer folder: tokenizer_config.json is missing"),
    "a size": (nothing, ["RUN", "OUT", "--max-shard-size", "large"], "--max-shard-size large is no size of a file: write it as 5GB"),
    "OUT is the checkpoint": (nothing, ["STEP", "STEP", "--overwrite"], " is the checkpoint "),
    "OUT is the run": (nothing, ["RUN", "RUN", "--overwrite"], " is the checkpoint "),
    "OUT is in the checkpoint": (nothing, ["RUN", "STEP/hf"], " lies in the checkpoint "),
    "OUT holds the checkpoint": (nothing, ["STEP", "RUN/checkpoints", "--overwrite"], " holds the checkpoint "),
    "OUT is a file": (nothing, ["RUN", "RUN/metrics.jsonl"], "is a file: choose a folder"),
    "OUT is occupied": (nothing, ["GONE", "RUN"], "is not empty: choose another folder, or replace it with --overwrite"),
    "OUT is no export": (
        a_thesis,
        ["RUN", "TMP/thesis", "--overwrite"],
        "is no earlier export (config.json is missing)",
    ),
    "OUT under a file": (nothing, ["RUN", "RUN/metrics.jsonl/hf"], "cannot be written: "),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """Exit code 2, and nothing is there that was not there before."""
    damage, arguments, message = MISTAKES[case]
    damage(copy)
    places = {"RUN": copy, "STEP": step_of(copy), "TMP": tmp_path, "GONE": tmp_path / "gone", "OUT": tmp_path / "out"}
    parts = [argument.partition("/") for argument in arguments]
    filled = [str(places[head] / rest) if head in places else head + slash + rest for head, slash, rest in parts]
    before = sorted(tmp_path.rglob("*"))
    assert hf("export", *filled) == 2
    told = capsys.readouterr()
    assert told.err.startswith("tools.hf: error: ") and message in told.err and told.err.count("\n") == 1 and not told.out, told.err
    assert sorted(tmp_path.rglob("*")) == before


def test_an_exported_folder_is_no_checkpoint(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hf("export", runs["transformer"], tmp_path / "out") == 0
    capsys.readouterr()
    assert hf("export", tmp_path / "out", tmp_path / "again") == 2
    assert "is a Hugging Face folder already" in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_a_tokenizer_that_is_gone(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((step_of(copy) / "manifest.json").read_text())
    manifest["config"]["data"]["tokenizer"] = str(tmp_path / "gone")
    (step_of(copy) / "manifest.json").write_text(json.dumps(manifest))
    assert hf("export", copy, tmp_path / "out") == 2
    assert f"{tmp_path / 'gone'}, is not there: name its folder with --tokenizer DIR" in capsys.readouterr().err


def test_data_that_cannot_be_read_are_a_note(runs: dict[str, Path], copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An export needs no data: what they would tell is left out."""
    shutil.copytree(runs["data"], tmp_path / "data")
    (tmp_path / "data" / "manifest.json").write_text("{")
    manifest = json.loads((step_of(copy) / "manifest.json").read_text())
    manifest["config"]["data"]["valid"] = manifest["config"]["data"]["train"] = [
        {"prefix": str(tmp_path / "data" / "valid"), "weight": 1.0}
    ]
    (step_of(copy) / "manifest.json").write_text(json.dumps(manifest))
    assert hf("export", copy, tmp_path / "out") == 0
    error = capsys.readouterr().err
    assert error.startswith("tools.hf: note: ") and "is damaged" in error and error.count("\n") == 1
    assert "bits per byte" not in (tmp_path / "out" / "README.md").read_text()


@contextmanager
def small_files() -> Iterator[None]:
    """A file system that takes 8 kB a file meanwhile, and says so as a full one does; pytest's own output may be such a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command may do later: exit code 1."""
    with small_files():
        code = hf("export", runs["transformer"], tmp_path / "out")
    assert code == 1
    line = rf"tools\.hf: error: {tmp_path}/out cannot be written: .*File too large; make room and give the same command again\n"
    assert re.fullmatch(line, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """In the middle of the weights: nothing of it stays, and an earlier export does."""
    assert hf("export", runs["transformer"], tmp_path / "out") == 0
    before, reads, read, handler = files(tmp_path / "out"), [0], Weights.read, signal.getsignal(number)

    def interrupted(self: Weights, names: Iterable[str]) -> dict[str, Tensor]:
        reads[0] += 1
        if reads[0] == 5:
            signal.raise_signal(number)
        return read(self, names)

    monkeypatch.setattr(Weights, "read", interrupted)
    capsys.readouterr()
    assert hf("export", runs["fem_softmax"], tmp_path / "out", "--overwrite") == 128 + number
    assert capsys.readouterr().err.endswith("; nothing was left behind\n")
    assert files(tmp_path / "out") == before and [path.name for path in tmp_path.iterdir()] == ["out"]
    assert signal.getsignal(number) is handler
    reads[0] = 5
    assert hf("export", runs["fem_softmax"], tmp_path / "out", "--overwrite") == 0
    assert (tmp_path / "out" / "modeling_fem.py").exists() and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_working_directory_is_not_replaced(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hf("export", runs["transformer"], tmp_path / "out") == 0
    (tmp_path / "out" / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "out" / "mine")
    assert hf("export", runs["transformer"], tmp_path / "out", "--overwrite") == 2
    assert (tmp_path / "out" / "mine").is_dir()


def test_arguments_need_no_torch() -> None:
    """--help and a wrong argument answer at once."""
    code = "import sys; from tools.hf.__main__ import _parser; _parser().parse_args(['export', 'a', 'b']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stdout + done.stderr
