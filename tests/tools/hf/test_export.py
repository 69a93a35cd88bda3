"""Tests of ``tools.hf export`` as a command: complete or absent, equal bytes every time, every
mistake in one line.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fem_megatron.catalogue import MIXERS
from pretrain.checkpoint.folder import Progress
from pretrain.checkpoint.reader import Weights
from pretrain.plan.run_plan import flops_per_token
from tests.tools.hf.checkpoints import hf, tensors
from tests.tools.hf.runs import (
    LENGTH,
    SAMPLES,
    STEP,
    Folders,
    edit_manifest,
    files,
    run_of,
    step_of,
)
from tests.tools.hf.small import VOCAB, small, write_tokenizer
from tests.tools.refusals import Refused
from tests.wording import Wording
from tools.hf.__main__ import main
from tools.hf.folder import json_object
from tools.hf.model_card import PAPERS

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_same_bytes_every_time(runs: Folders, exports: Folders, tmp_path: Path) -> None:
    """Export in this process, and by the command elsewhere, with another order of Python's sets, no
    GPU and no warning.
    """
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    code = (
        "import sys; from tools.hf.__main__ import _parser as p, main;"
        " p().parse_args(sys.argv[1:4]); early = 'torch' in sys.modules; "
    )
    # Wrong arguments are reported before torch is imported.
    code += "sys.exit(early or main(sys.argv[1:4]) or main(sys.argv[4:]))"
    again: list[str | Path] = []
    for name in ("fem_softmax", "transformer"):
        again += ["export", runs[name], tmp_path / "deep" / name]
    done = subprocess.run(
        [sys.executable, "-c", code, *again],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    for name in ("fem_softmax", "transformer"):
        assert f" verify {tmp_path / 'deep' / name} {runs[name]}\n" in done.stdout  # the next step
        first, second = files(exports[name]), files(tmp_path / "deep" / name)
        assert first == second and len(first) > 6
        assert len({file.stat().st_mode & 0o777 for file in exports[name].iterdir()}) == 1


def test_a_transformer_needs_no_code(exports: Folders) -> None:
    config = json_object(exports["transformer"] / "config.json")
    assert not list(exports["transformer"].glob("*.py")) and "auto_map" not in config
    assert (config["architectures"], config["dtype"], config["max_position_embeddings"]) == (
        ["LlamaForCausalLM"],
        "float32",
        LENGTH,
    )
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (None, 0, 0)
    assert "trust_remote_code" not in (exports["transformer"] / "README.md").read_text()


def test_what_is_reported_of_the_training(
    runs: Folders, exports: Folders, tmp_path: Path, wording: Wording
) -> None:
    """For programs: the data that an import restores; for readers: the model card, whose numbers
    are recomputed in this test.
    """
    folder, run = exports["fem_softmax"], runs["fem_softmax"]
    training = json_object(folder / "training.json")
    assert training == {
        "format": 1,
        "config": json_object(step_of(run) / "manifest.json")["config"],
        "progress": json.loads(json.dumps(asdict(Progress(STEP, SAMPLES, 2 * SAMPLES)))),
        "data": "data-key",
        "inherited": {"foreign": False},
        "heldout_loss": 3.0,
    }
    card, tokens = (folder / "README.md").read_text(), SAMPLES * LENGTH
    wording(card)
    for row in (
        "| Data | `data/train` (75% of the blend, 900 tokens); `data/other` (25% of the blend) |",
        f"| Tokens seen | {tokens:,} |",
        # 4: the manifest of the data gives four bytes per token.
        f"| Held-out bits per byte | {3.0 / math.log(2) / 4:.4f} |",
    ):
        assert f"\n{row}\n" in card, row
    per_token, all_of_them = (
        float(found) for found in re.findall(r"Training FLOPs.* \| (\S+) \|", card)
    )
    expected = flops_per_token(run_of(small("fem_softmax"), runs["data"]))
    assert per_token == pytest.approx(expected, rel=1e-3)
    assert all_of_them == pytest.approx(per_token * tokens, rel=1e-3)
    parameters = sum(tensor.numel() for tensor in tensors(folder).values())
    assert f" of {parameters:,} parameters " in card
    generation = json_object(folder / "generation_config.json")
    assert generation.pop("transformers_version")
    assert generation == {"eos_token_id": 0, "pad_token_id": 0}
    link, out = tmp_path / "link", tmp_path / "out"
    link.mkdir()
    # runs/demo links to the demo's model in the same way.
    (link / "checkpoints").symlink_to(run / "checkpoints")
    assert hf("export", link, out) == 0 and files(out) == files(folder)


def test_little_is_known(
    copy: Path,
    runs: Folders,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    wording: Wording,
) -> None:
    """Without readable data, log and tokenizer the export succeeds and states no unknown facts."""
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    (data / "manifest.json").write_text("{")
    edit_manifest(
        copy,
        lambda content: content["config"]["data"].update(
            train=[], valid=[{"prefix": str(data / "v")}], tokenizer=None
        ),
    )
    edit_manifest(copy, lambda content: content["progress"].update(step=0, consumed_samples=0))
    step_of(copy).rename(copy / "checkpoints" / "step_00000000")
    (copy / "metrics.jsonl").unlink()
    assert hf("export", copy, out) == 0
    wording(capsys.readouterr().err)
    wording((out / "README.md").read_text())
    assert json_object(out / "training.json")["heldout_loss"] is None
    # An imported checkpoint has its tokenizer at this path.
    shutil.copytree(runs["data"] / "tokenizer", copy / "checkpoints" / "tokenizer")
    edit_manifest(copy, lambda content: content.update(heldout_loss=2.25))
    assert hf("export", copy, out, "--overwrite") == 0
    assert (out / "tokenizer.json").is_file()
    assert "| 2.2500 |" in (out / "README.md").read_text()


def test_every_mixers_paper_can_be_cited() -> None:
    for name, mixer in MIXERS.items():
        assert (mixer.paper in PAPERS) == (mixer.package is None), name
    for entry in PAPERS.values():
        assert not entry.startswith("@") or (
            re.match(r"@\w+\{\w+,\n  title", entry) and entry.count("{") == entry.count("}")
        )


def test_of_a_tokenizers_folder_its_files_alone_go_along(runs: Folders, tmp_path: Path) -> None:
    """The folder may be that of a full model with weights and code."""
    folder = Path(shutil.copytree(runs["data"] / "tokenizer", tmp_path / "model"))
    out = tmp_path / "out"
    others = (
        "config.json model-00001-of-00002.safetensors model.safetensors.index.json modeling_x.py"
        " README.md training.json".split()
    )
    for name in others:
        (folder / name).write_text('{"theirs": 1}')
    (folder / "merges.txt").write_text("a b\n")
    assert hf("export", runs["transformer"], out, "--tokenizer", folder) == 0
    assert (out / "merges.txt").read_text() == "a b\n"
    assert not [
        name for name in others if (out / name).is_file() and "theirs" in (out / name).read_text()
    ]
    assert json_object(out / "tokenizer_config.json")["model_input_names"] == [
        "input_ids",
        "attention_mask",
    ]


def only(out: Path, wanted: Path) -> bool:
    """Return True if ``out`` is alone in its folder and contains the same files as ``wanted``."""
    return files(out) == files(wanted) and list(out.parent.iterdir()) == [out]


# --- mistakes -------------------------------------------------------------------------------------


def manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda run: edit_manifest(run, change)


def model(**changes: Any) -> Callable[[Path], None]:
    return manifest(lambda content: content["config"]["model"].update(changes))


def zeros(run: Path) -> None:
    """Replace the largest file of tensors by zeros."""
    file = max(step_of(run).glob("*.distcp"), key=lambda file: (file.stat().st_size, file.name))
    file.write_bytes(bytes(file.stat().st_size))


def tokenizer(entries: int) -> Callable[[Path], None]:
    return lambda run: (write_tokenizer(run.parent / "tokenizer", entries), None)[1]


def thesis(run: Path) -> None:
    (run.parent / "thesis").mkdir()
    (run.parent / "thesis" / "last.tex").touch()


def stand_in_thesis(run: Path) -> None:
    thesis(run)
    os.chdir(run.parent / "thesis")


def nothing(run: Path) -> None:
    pass


# Name -> (damage to the run folder RUN or to TMP, arguments of the command).
MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no such path": (nothing, "GONE OUT"),
    "a file": (nothing, "STEP/manifest.json OUT"),
    "an empty folder": (lambda run: (run.parent / "empty").mkdir(), "TMP/empty OUT"),
    "an export": (nothing, "EXPORT OUT"),
    "no manifest in the run": (lambda run: (step_of(run) / "manifest.json").unlink(), "RUN OUT"),
    "no configuration": (manifest(lambda content: content.pop("config")), "STEP OUT"),
    "no progress": (manifest(lambda content: content.pop("progress")), "RUN OUT"),
    "zeros": (zeros, "RUN OUT"),
    "an unknown key": (model(num_layer=1), "RUN OUT"),
    "another model": (model(num_layers=3), "RUN OUT"),
    "another shape": (model(ffn_hidden_size=64), "RUN OUT"),
    "no vocabulary": (model(vocab_size=None), "RUN OUT"),
    "another package's layer": (model(mixer="fla.GatedLinearAttention"), "RUN OUT"),
    "a tokenizer too large": (tokenizer(VOCAB + 1), "RUN OUT --tokenizer TMP/tokenizer"),
    "another tokenizer": (tokenizer(VOCAB - 1), "RUN OUT --tokenizer TMP/tokenizer"),
    "no tokenizer": (nothing, "RUN OUT --tokenizer RUN"),
    "a tokenizer that is gone": (
        manifest(lambda content: content["config"]["data"].update(tokenizer="gone")),
        "RUN OUT",
    ),
    "a license": (nothing, "RUN OUT --license Apache-2.0"),
    "a size": (nothing, "RUN OUT --max-shard-size large"),
    "OUT is the checkpoint": (nothing, "STEP STEP --overwrite"),
    "OUT is the run": (nothing, "RUN RUN --overwrite"),
    "OUT is in the checkpoint": (nothing, "RUN STEP/hf"),
    "OUT holds the checkpoint": (nothing, "STEP RUN/checkpoints --overwrite"),
    "OUT is a file": (nothing, "RUN RUN/metrics.jsonl"),
    "OUT is occupied": (nothing, "GONE RUN"),
    "OUT is no export": (thesis, "RUN TMP/thesis --overwrite"),
    "OUT under a file": (nothing, "RUN RUN/metrics.jsonl/hf"),
    "OUT holds the working directory": (stand_in_thesis, "RUN TMP/thesis --overwrite"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(
    copy: Path,
    runs: Folders,
    exports: Folders,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
    case: str,
) -> None:
    """The exit code is 2, and no new file exists."""
    tmp_path, (damage, arguments) = copy.parent, MISTAKES[case]
    monkeypatch.chdir(tmp_path)  # monkeypatch restores the folder
    damage(copy)
    export = exports["transformer"]
    places = {
        "RUN": copy,
        "STEP": step_of(copy),
        "TMP": tmp_path,
        "GONE": tmp_path / "gone",
        "OUT": tmp_path / "out",
        "EXPORT": export,
    }
    parts = [argument.partition("/") for argument in arguments.split()]
    before = sorted(tmp_path.rglob("*"))
    filled = [places[head] / rest if head in places else head for head, _, rest in parts]
    refused(main, "tools.hf", "export", *filled, EXPORT=export, DATA=runs["data"])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk(
    runs: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    """A file system with a limit of 8 kB per file: exit code 1, because the same command may
    succeed later.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, before[1]))
    try:
        code = hf("export", runs["transformer"], tmp_path / "out")
    finally:
        # The output file of pytest itself may exceed the limit.
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1 and not list(tmp_path.iterdir())
    wording(capsys.readouterr().err)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(
    runs: Folders,
    exports: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    """An interruption within the weights leaves no files, and keeps an earlier export."""
    out = shutil.copytree(exports["transformer"], tmp_path / "out")
    reads = [0]
    read = Weights.read
    handler = signal.getsignal(number)

    def interrupted(self: Weights, names: Iterable[str]) -> dict[str, Tensor]:
        reads[0] += 1
        if reads[0] == 5:
            signal.raise_signal(number)
        return read(self, names)

    monkeypatch.setattr(Weights, "read", interrupted)
    assert hf("export", runs["fem_softmax"], out, "--overwrite") == 128 + number
    assert only(out, exports["transformer"])
    assert signal.getsignal(number) is handler
    assert hf("export", runs["fem_softmax"], out, "--overwrite") == 0
    assert only(out, exports["fem_softmax"])


def test_an_export_that_cannot_take_its_place_leaves_the_earlier_one(
    runs: Folders, exports: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(exports["transformer"], tmp_path / "out")
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if Path(source).name == "model":
            raise OSError(errno.EIO, "it cannot be renamed")
        rename(source, target)

    monkeypatch.setattr("os.rename", refuse)
    assert hf("export", runs["fem_softmax"], out, "--overwrite") == 1
    assert only(out, exports["transformer"])
