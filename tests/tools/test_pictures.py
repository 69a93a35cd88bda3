"""Tests of tools.papers' images in files."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fem_common.errors import UserError
from tools.papers import catalogue, images, masked, running
from tools.papers.experiment import Outcome


def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Work in ``folder``, with the cache of the library of data sets in it; return the library."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    return datasets


def test_files_of_images_are_cut_to_the_middle_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One folder per class, wide, high and grey files; the colour at the centre of an image
    identifies its class.
    """
    experiment = catalogue.experiment_of("imagenet-100")
    datasets = in_folder(tmp_path, monkeypatch)
    monkeypatch.setitem(images.CASES, images.FILES, (32, 3, 3, 16))
    size = replace(
        experiment.sizes["full"], width=16, heads=2, steps=2, batch=4, test=2, rates=(1e-3,)
    )
    for part, number in (("train", 4), ("val", 2)):
        for label in range(3):
            folder = catalogue.DATA / "imagenet-100" / part / f"n0{label}"
            folder.mkdir(parents=True)
            for n in range(number):
                picture = Image.new("RGB", (90, 40) if n % 2 else (40, 70), "white")
                left, top = picture.width // 2 - 20, picture.height // 2 - 20
                picture.paste((label * 100,) * 3, (left, top, left + 40, top + 40))
                (picture.convert("L") if n == 1 else picture).save(folder / f"{n}.png")
    (inputs, targets), (_, validation), (test, requested) = images.divided(images.FILES, size, 0)
    assert (len(targets), len(validation), len(requested)) == (10, 2, 6)
    for made, labels in (
        (inputs[torch.arange(10)], targets),
        (torch.cat([*test.split(4)]), requested),
    ):
        assert made.shape[1:] == (3, 32, 32)
        # The square of 40 pixels is resized to 36.6, of which 32 are kept; bicubic edges extend two
        # pixels inwards.
        assert torch.allclose(
            made[:, :, 2:-2, 2:-2],
            (labels[:, None, None, None] * 100 / 127.5 - 1).expand(-1, 3, 28, 28),
            atol=0.02,
        )
    outcome = Outcome(experiment, "full", replace(size, rows=("Hyper-SET",)), {})
    running.run(outcome, tmp_path / "results.jsonl", 1)
    (record,) = outcome.results.values()
    assert math.isfinite(record["loss"]) and {"accuracy", "twice_accuracy"} <= {*record}
    # The same pictures from parquet files, as on the Hub.
    every = torch.arange(10)
    full, requested = inputs[every], test[every[:3]]
    kept = folder.parents[1].rename(tmp_path / "files")
    folder.parents[1].mkdir()
    for part, kind in (("train", "train"), ("val", "validation")):
        files = sorted((kept / part).glob("*/*.png"))
        columns = {
            "image": [str(file) for file in files],
            "label": [int(file.parent.name[-1]) for file in files],
        }
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        datasets.Dataset.from_dict(columns, features=features).to_parquet(
            folder.parents[1] / f"{kind}-0.parquet"
        )
    (again, numbers), *_, (last, _) = images.divided(images.FILES, size, 0)
    assert torch.equal(again[every], full)
    assert torch.equal(numbers, targets)
    assert torch.equal(last[:3][every[:3]], requested)
    monkeypatch.setitem(images.CASES, images.FILES, (32, 3, 4, 16))
    with pytest.raises(UserError, match="3 classes from 0 to 2; expected 4 from 0 on"):
        images.divided(images.FILES, size, 0)
    monkeypatch.setitem(images.CASES, images.FILES, (32, 3, 3, 16))
    shutil.rmtree(folder.parents[1])
    kept.rename(folder.parents[1])
    (folder / "0.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"val/n02/0.png: the image cannot be read"):
        test[torch.tensor([4])]
    shutil.rmtree(folder)
    with pytest.raises(
        UserError, match=r"imagenet-100, or clane9/.*: 2 classes from 0 to 1; expected 3"
    ):
        images.divided(images.FILES, size, 0)


@pytest.mark.parametrize("form", ["save_to_disk", "parquet"])
def test_cifar_is_read_from_a_folder(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both forms give the same pixels and classes; the fine label is used if two exist."""
    datasets = in_folder(tmp_path, monkeypatch)
    folder = catalogue.DATA / "cifar-100"
    monkeypatch.setitem(images.CASES, "CIFAR-100", (32, 3, 3, 8))
    parts = {}
    for part, count in (("train", 12), ("test", 6)):
        shades = [Image.new("RGB", (32, 32), (n % 3 * 100, 20, n)) for n in range(count)]
        features = datasets.Features(
            {
                "img": datasets.Image(),
                "fine_label": datasets.Value("int64"),
                "coarse_label": datasets.Value("int64"),
            }
        )
        rows = {
            "img": shades,
            "fine_label": [n % 3 for n in range(count)],
            "coarse_label": [9] * count,
        }
        parts[part] = datasets.Dataset.from_dict(rows, features=features)
    folder.mkdir(parents=True)
    if form == "save_to_disk":
        datasets.DatasetDict(parts).save_to_disk(folder)
    else:
        for part, rows in parts.items():
            rows.to_parquet(folder / f"{part}-00000-of-00001.parquet")
    full, classes, first = images.images("CIFAR-100")
    assert full.shape == (18, 3, 32, 32) and first == 12
    stored = ((full + 1) * 127.5).round()
    assert torch.equal(stored[:, 0, 0, 0], classes * 100.0)
    assert sorted(stored[:12, 2, 5, 5].tolist()) == list(range(12))
    monkeypatch.setitem(images.CASES, "CIFAR-100", (32, 3, 100, 8))
    with pytest.raises(UserError, match="CIFAR-100: 3 classes from 0 to 2; expected 100 from 0 on"):
        images.images("CIFAR-100")
    monkeypatch.setitem(images.CASES, "CIFAR-100", (16, 3, 3, 8))
    with pytest.raises(
        UserError, match="CIFAR-100: the images have shape 32 x 32 x 3; expected 16 x 16 x 3"
    ):
        images.images("CIFAR-100")


def test_cifar_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = in_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        UserError,
        match=(
            r"neither runs/papers/data/cifar-10 nor uoft-cs/cifar10 on the Hub could be"
            r" read.*local-dir"
        ),
    ):
        images.images("CIFAR-10")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"label": [1]})}).save_to_disk(
        catalogue.DATA / "cifar-10"
    )
    with pytest.raises(UserError, match="cifar-10: parts train; expected train and test"):
        images.images("CIFAR-10")


def test_what_is_hidden_is_not_seen_and_alone_is_requested() -> None:
    drawn = torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for training, least, most in ((True, 1, 6), (False, 6, 6)):  # 40 % of 16 patches
        inputs, targets = masked.examples(drawn, 1, training=training)
        gone = inputs[..., -1] > 0
        assert len(inputs) == 50 * (masked.VIEWS if training else 1)
        assert int(gone.sum(1).min()) == least and int(gone.sum(1).max()) == most
        assert (inputs[gone][:, :-1] == 0).all()
        assert torch.equal(inputs[~gone][:, :-1], targets[~gone])
        assert gone.any(0).all() and len(gone.unique(dim=0)) > 40
    other = torch.where(gone[..., None], targets + 0.5, torch.rand_like(targets))
    assert masked.loss(other, inputs, targets) == pytest.approx(0.25)
    found = masked.scores(other, inputs, targets)
    # 24 of 64 pixels differ by 0.5.
    assert float(found["psnr"][0]) / 50 == pytest.approx(10 * math.log10(4 / (0.25 * 24 / 64)))
    assert float(masked.scores(targets, inputs, targets)["ssim"][0]) / 50 == pytest.approx(1)
    assert float(found["ssim"][0]) / 50 < 0.9
    # A computed pair: means 0 and 0.5, equal variances of 1, covariance 1.
    x = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    c1, c2 = 4e-4, 3.6e-3
    assert float(masked.similarity(x, x + 0.5)) == pytest.approx(
        c1 / (0.25 + c1) * (2 + c2) / (2 + c2)
    )


def test_digits_are_divided_anew_for_every_seed() -> None:
    size = replace(images.QUICK, train=64, test=32)
    parts, others = images.divided("digits", size, 0), images.divided("digits", size, 1)
    assert [len(inputs) for inputs, _ in parts] == [64, 32, 32]
    assert not torch.equal(parts[0][0], others[0][0])
    everything = torch.cat([inputs for inputs, _ in parts]).flatten(1)
    assert len(everything.unique(dim=0)) == 128 and everything.min() == -1 and everything.max() == 1
    assert {*parts[0][1].tolist()} == set(range(10))
