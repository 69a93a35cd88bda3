"""Training from an imported folder at any layout: the first loss is that of the folder's model in
transformers, and the saved checkpoint exports as that folder again. Real gloo ranks: a model
trained at any layout equals the one that its engine computed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from pretrain.__main__ import main
from pretrain.checkpoint.folder import find
from tests.pretrain.conftest import DEMO
from tests.pretrain.data_folder import write_folder
from tests.ranks import VARIABLES, finished, losses
from tests.tools.hf.checkpoints import equal, hf, stock_folder, tensors
from tests.tools.hf.small import MIXERS, VOCAB, export, random_state, small
from tests.tools.refusals import Refused
from tools.hf.folder import json_object
from tools.hf.open_model import open_model

LENGTH, CONTEXT = 16, 64
MODELS = ("every mixer", "fem", "qwen2")
TEXT = [(7 * n * n + 3 * n) % (VOCAB - 1) for n in range(LENGTH)]
# Keys of config.json that training does not change.
OF_THE_MODEL = (
    "max_position_embeddings bos_token_id eos_token_id pad_token_id rope_parameters sliding_window"
    " architecture".split()
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One text repeated, as long as a sequence: every sample is equal, in any order and on every
    rank.
    """
    folder = write_folder(
        tmp_path_factory.mktemp("resume") / "data",
        vocab_size=VOCAB,
        documents=[TEXT * 60 + TEXT[:1]],
    )
    (folder / "manifest.json").unlink()  # the data then has no known tokenizer
    return folder


@pytest.fixture(scope="module", params=MODELS)
def imported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, float]:
    """A checkpoint, and the loss of its source folder by transformers."""
    place = tmp_path_factory.mktemp("imported")
    if request.param == "qwen2":
        folder = stock_folder("qwen2", place / "hf", eos_token_id=[3, 4])
    else:  # 50 entries, padded to 64: at TP2 most of one rank's rows are padding
        pattern: tuple[str, ...] = ("fem_softmax", "cem")
        if request.param == "every mixer":  # an even number of layers, for two stages
            pattern = (*MIXERS, *MIXERS[: len(MIXERS) % 2])
        model = small(
            pattern=pattern,
            num_layers=len(pattern),
            tie_embeddings=True,
            make_vocab_size_divisible_by=64,
        )
        # Gains below one in every layer, as in trained models; otherwise rounding would grow from
        # layer to layer.
        state = {
            name: tensor / 2 if tensor.ndim > 1 else tensor
            for name, tensor in random_state(model).items()
        }
        folder = export(model, place / "hf", state=state, card={"seq_length": CONTEXT})
    assert hf("import", folder, place / "ck") == 0
    with torch.no_grad():
        logits = open_model(folder).model(torch.tensor([TEXT])).logits[0]
    return place / "ck", cross_entropy(logits.double(), torch.tensor([*TEXT[1:], TEXT[0]])).item()


def arguments(checkpoint: Path, data: Path, run_dir: Path, *more: str) -> list[str]:
    settings = f"""
        run_dir={run_dir} model={checkpoint}/model.yaml checkpoint.load={checkpoint}
        data.seq_length={LENGTH} data.train.0.prefix={data / "train"} data.valid=[] data.test=[]
        train.steps=2 train.micro_batch_size=1 train.global_batch_size=2 train.precision=fp32
        optimizer.warmup_steps=0
    """
    return [DEMO, *settings.split(), *more]


def check(checkpoint: Path, run_dir: Path, loss: float, tolerance: float) -> None:
    """Check the first step's loss and, with a zero learning rate, that the weights are unchanged in
    the run's dtype.
    """
    found = losses(run_dir)
    assert loss > 3 and found[1][0] == pytest.approx(loss, rel=tolerance)  # far from uniform
    assert hf("export", run_dir, run_dir / "hf") == 0
    wanted, got = tensors(checkpoint.parent / "hf"), tensors(run_dir / "hf")
    equal(got, {name: tensor.to(got[name].dtype) for name, tensor in wanted.items()})
    there = json_object(checkpoint.parent / "hf" / "config.json")
    here = json_object(run_dir / "hf" / "config.json")
    assert {key: here.get(key) for key in OF_THE_MODEL} == {
        key: there.get(key) for key in OF_THE_MODEL
    }


STILL = ("train.steps=1", "optimizer.lr=1e-30", "optimizer.min_lr=0", "optimizer.weight_decay=0")
LAYOUTS = {
    "DP2": "",
    "TP2": "parallel.tensor_model_parallel_size=2",
    "TP2+SP": (
        "parallel.tensor_model_parallel_size=2 parallel.sequence_parallel=true train.precision=bf16"
    ),
    "PP2": "parallel.pipeline_model_parallel_size=2",
}


# Every layout and every model once, with tied embeddings at each end of a pipeline; the other pairs
# are slow.
QUICK = [
    ("every mixer", "TP2"),
    ("fem", "TP2+SP"),
    ("fem", "PP2"),
    ("qwen2", "DP2"),
    ("qwen2", "TP2"),
]
PAIRS = [
    pytest.param(
        model,
        layout,
        id=f"{model}-{layout}",
        marks=[] if (model, layout) in QUICK else pytest.mark.slow,
    )
    for model in MODELS
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("imported", "layout"), PAIRS, indirect=["imported"])
def test_two_ranks(layout: str, imported: tuple[Path, float], data: Path, tmp_path: Path) -> None:
    given = arguments(imported[0], data, tmp_path / "run", *STILL, *LAYOUTS[layout].split())
    finished(2, given, tmp_path / "out")
    # 1e-6: a sum over ranks, or over another order of channels. 2e-2: activations rounded to 8 bits
    # several times in every layer.
    check(imported[0], tmp_path / "run", imported[1], 2e-2 if "bf16" in LAYOUTS[layout] else 1e-6)


@pytest.mark.parametrize("imported", ["fem", "qwen2"], indirect=True)
def test_one_process(imported: tuple[Path, float], data: Path, tmp_path: Path) -> None:
    assert main(arguments(imported[0], data, tmp_path / "run", *STILL)) == 0
    check(imported[0], tmp_path / "run", imported[1], 1e-6)
    assert main(arguments(imported[0], data, tmp_path / "learns")) == 0
    found = losses(tmp_path / "learns")
    assert found[1][0] == pytest.approx(imported[1], rel=1e-6) and found[2][0] < found[1][0]
    assert [find(place).inherited.foreign for place in (imported[0], tmp_path / "learns")] == [
        True,
        False,
    ]


def test_the_models_own_context_length_never_shrinks(data: Path, tmp_path: Path) -> None:
    """A graft trained on shorter sequences, stopped and resumed; its weights trained on longer
    ones; and those on shorter ones again.
    """
    assert (
        hf("import", stock_folder("llama", tmp_path / "hf"), tmp_path / "ck", "--mixer", "fem_gla")
        == 0
    )
    checkpoint = tmp_path / "ck"
    for run, steps, length, context in (
        ("a", 1, 16, 64),
        ("a", 2, 16, 64),
        ("b", 1, 128, 128),
        ("c", 1, 16, 128),
    ):
        settings = (
            f"checkpoint.load={checkpoint}",
            f"train.steps={steps}",
            f"data.seq_length={length}",
        )
        assert main(arguments(tmp_path / "ck", data, tmp_path / run, *settings)) == 0
        assert find(tmp_path / run).progress.step == steps
        assert hf("export", tmp_path / run, tmp_path / "out", "--overwrite") == 0
        report = json_object(tmp_path / "out" / "config.json")
        assert report["max_position_embeddings"] == context
        assert (report["bos_token_id"], report["eos_token_id"]) == (1, 2)
        if run != "a" or steps == 2:
            checkpoint = tmp_path / run


@pytest.mark.parametrize("imported", ["fem"], indirect=True)
def test_no_run_resumes_from_weights_alone_or_starts_from_another_models(
    imported: tuple[Path, float], data: Path, tmp_path: Path, refused: Refused
) -> None:
    checkpoint, _ = imported
    shutil.copytree(checkpoint, tmp_path / "run" / "checkpoints")
    for run, more in (("run", ()), ("other", ("model.rope_base=7",))):
        refused(
            main,
            "pretrain",
            *arguments(checkpoint, data, tmp_path / run, *more),
            IMPORTED=checkpoint,
        )
