"""tools.papers' images in files."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from fem_common.errors import UserError
from tools.papers import catalogue, images, running


def test_files_of_images_are_cut_to_the_middle_and_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder a class, wide and high files, grey ones too; the colour of an image's middle says its class."""
    experiment = catalogue.experiment_of("imagenet-100")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(images.CASES, images.FILES, (32, 3, 3, 16))
    size = replace(experiment.sizes["full"], width=16, heads=2, steps=2, batch=4, test=2, rates=(1e-3,))
    for part, number in (("train", 4), ("val", 2)):
        for label in range(3):
            folder = catalogue.DATA / "imagenet-100" / part / f"n0{label}"
            folder.mkdir(parents=True)
            for n in range(number):
                picture = Image.new("RGB", (90, 40) if n % 2 else (40, 70), "white")
                left, top = picture.width // 2 - 20, picture.height // 2 - 20
                picture.paste((label * 100,) * 3, (left, top, left + 40, top + 40))
                (picture.convert("L") if n == 1 else picture).save(folder / f"{n}.png")
    (inputs, targets), (_, validation), (test, asked) = images.divided(images.FILES, size, 0)
    assert (len(targets), len(validation), len(asked)) == (10, 2, 6)
    for made, labels in ((inputs[torch.arange(10)], targets), (torch.cat([*test.split(4)]), asked)):
        assert made.shape[1:] == (3, 32, 32)
        # The square of 40 pixels became 36.6, of which 32 are kept; bicubic edges reach two pixels in.
        assert torch.allclose(made[:, :, 2:-2, 2:-2], (labels[:, None, None, None] * 100 / 127.5 - 1).expand(-1, 3, 28, 28), atol=0.02)
    (record,) = running.run(experiment, "full", replace(size, rows=("Hyper-SET",)), tmp_path / "results.jsonl", 1).values()
    assert math.isfinite(record["loss"]) and {"accuracy", "twice_accuracy"} <= {*record}
    (folder / "0.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"val/n02/0.png: no image that can be read"):
        test[torch.tensor([4])]
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"imagenet-100/val: 2 folders of classes, 3 are needed.*CMC"):
        images.divided(images.FILES, size, 0)
