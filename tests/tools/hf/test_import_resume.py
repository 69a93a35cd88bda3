"""Training from an imported folder, at any layout: its first loss is that of the folder's own model in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from pretrain.__main__ import main
from pretrain.checkpoint.reader import find
from tests.pretrain.conftest import DEMO
from tests.pretrain.data_folder import write_folder
from tests.ranks import losses, started
from tests.tools.hf.checkpoints import hf, stock_folder
from tests.tools.hf.small import VOCAB, export, small
from tools.hf.open_model import open_model

LENGTH, CONTEXT = 16, 64
TEXT = [(7 * n * n + 3 * n) % (VOCAB - 1) for n in range(LENGTH)]
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One text over and over, as long as a sequence: every sample is the same, in whatever order and on whichever rank."""
    folder = write_folder(tmp_path_factory.mktemp("resume") / "data", vocab_size=VOCAB, documents=[TEXT * 60 + TEXT[:1]])
    (folder / "manifest.json").unlink()  # so that no tokenizer is known
    return folder


@pytest.fixture(scope="module", params=["fem", "qwen2"])
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A checkpoint, and the loss of the folder that it was made of, by transformers."""
    place = tmp_path_factory.mktemp("imported")
    if request.param == "fem":  # 50 entries padded to 64: at TP2 one rank holds most of the padding
        model = small(pattern=("fem_softmax", "cem"), tie_embeddings=True, make_vocab_size_divisible_by=64)
        folder = export(model, place / "hf", card={"seq_length": CONTEXT})
    else:
        folder = stock_folder("qwen2", place / "hf", eos_token_id=[3, 4])
    assert hf("import", folder, place / "ck") == 0
    with torch.no_grad():
        logits = open_model(folder).model(torch.tensor([TEXT])).logits[0]
    return place / "ck", cross_entropy(logits.double(), torch.tensor([*TEXT[1:], TEXT[0]])).item()


def arguments(checkpoint: Path, data: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        DEMO,
        f"run_dir={run_dir}",
        f"model={checkpoint}/model.yaml",
        f"checkpoint.load={checkpoint}",
        f"data.train.0.prefix={data / 'train'}",
        "data.valid=[]",
        "data.test=[]",
        f"data.seq_length={LENGTH}",
        "train.steps=2",
        "train.micro_batch_size=1",
        "train.global_batch_size=2",
        "train.precision=fp32",
        "optimizer.warmup_steps=0",
        *more,
    ]


def here(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> int:
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    return main(given)


def check(run_dir: Path, wanted: float) -> None:
    found = losses(run_dir)
    # fp32 throughout; a sum over ranks, or over another order of channels, differs in the last bit or two.
    assert found[1][0] == pytest.approx(wanted, rel=1e-6)
    assert wanted > 3 and found[2][0] < found[1][0]  # far from uniform, and it learns


def test_one_process(
    imported: tuple[Path, float], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, wanted = imported
    assert here(monkeypatch, arguments(checkpoint, data, tmp_path / "run")) == 0
    assert f"weights taken from {find(checkpoint).path}" in capsys.readouterr().out
    check(tmp_path / "run", wanted)
    assert find(tmp_path / "run").progress.step == 2
    assert hf("export", tmp_path / "run", tmp_path / "hf") == 0
    assert of_the_model(tmp_path / "hf") == of_the_model(checkpoint.parent / "hf")


def of_the_model(folder: Path) -> dict[str, object]:
    """What a folder says of the model that no training changes, besides its weights' names and shapes."""
    config = json.loads((folder / "config.json").read_text())
    keys = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "rope_parameters", "sliding_window", "architecture")
    return {key: config.get(key) for key in keys}


def test_the_models_own_context_length_never_shrinks(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graft trained shorter, stopped and resumed; its run's weights longer than ever; and those shorter again."""
    assert hf("import", stock_folder("llama", tmp_path / "hf"), tmp_path / "ck", "--mixer", "fem_gla") == 0
    checkpoint = tmp_path / "ck"
    for run, steps, length, context in (("a", 1, 16, 64), ("a", 2, 16, 64), ("b", 1, 128, 128), ("c", 1, 16, 128)):
        settings = (f"checkpoint.load={checkpoint}", f"train.steps={steps}", f"data.seq_length={length}")
        given = arguments(tmp_path / "ck", data, tmp_path / run, *settings)
        assert here(monkeypatch, given) == 0
        assert find(tmp_path / run).progress.step == steps
        assert hf("export", tmp_path / run, tmp_path / "out", "--overwrite") == 0
        told = json.loads((tmp_path / "out" / "config.json").read_text())
        assert (told["max_position_embeddings"], told["bos_token_id"], told["eos_token_id"]) == (context, 1, 2)
        assert f"\n| Context length | {context} |\n" in (tmp_path / "out" / "README.md").read_text()
        checkpoint = tmp_path / run if run != "a" or steps == 2 else checkpoint


@pytest.mark.parametrize("layout", ["tensor", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_two_ranks(layout: str, imported: tuple[Path, float], data: Path, tmp_path: Path) -> None:
    checkpoint, wanted = imported
    given = arguments(checkpoint, data, tmp_path / "run", f"parallel.{layout}_model_parallel_size=2")
    with started(2, given, tmp_path / "out") as ranks:
        for rank in ranks:
            rank.join(120)
        assert [rank.exitcode for rank in ranks] == [0, 0], (tmp_path / "out.0").read_text()
    check(tmp_path / "run", wanted)


@pytest.mark.parametrize("imported", ["fem"], indirect=True)
def test_a_run_does_not_resume_from_weights_alone(
    imported: tuple[Path, float], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor from those of another model; one line each."""
    checkpoint, _ = imported
    shutil.copytree(checkpoint, tmp_path / "run" / "checkpoints")
    assert here(monkeypatch, arguments(checkpoint, data, tmp_path / "run")) == 2
    err = capsys.readouterr().err
    assert "holds weights alone, no optimizer's state to resume from: start from them with checkpoint.load=" in err and err.count("\n") == 1
    assert here(monkeypatch, arguments(checkpoint, data, tmp_path / "other", "model.rope_base=7")) == 2
    assert "is of another model: model.rope_base is 10000 there, 7 here" in capsys.readouterr().err


@pytest.mark.parametrize("imported", ["fem"], indirect=True)
def test_other_tools_take_it(imported: tuple[Path, float], data: Path, tmp_path: Path) -> None:
    from tools.diagnose.__main__ import main as diagnose

    checkpoint, _ = imported
    out = tmp_path / "layers.png"
    try:
        assert diagnose([str(checkpoint), "--data", str(data / "train"), "--tokens", "12", "--out", str(out)]) == 0
    finally:  # a command ends with its process; this one goes on
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert out.stat().st_size > 1000
    assert hf("verify", checkpoint, checkpoint.parent / "hf") == 0
