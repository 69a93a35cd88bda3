"""Images in files, a folder a class, as ImageNet is kept; decoded when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fem_common.errors import UserError

SHORTER = 8 / 7  # of the square's side, before the cut: 256 where 224 are kept


class Pictures:
    """Of `training.Examples` the inputs: [n, 3, side, side], float32 from -1 to 1, the middle square of each file's image.

    As numbers ImageNet-100's would be 76 GB. Decoding leaves Python's lock, so threads share it.
    """

    def __init__(self, files: Sequence[Path], side: int, where: torch.device | str = "cpu") -> None:
        self.files, self.side, self.where = files, side, where

    def __len__(self) -> int:
        return len(self.files)

    def to(self, where: torch.device | str) -> Pictures:
        """The same, told where their numbers are to be."""
        return Pictures(self.files, self.side, where)

    def __getitem__(self, key: Tensor | slice) -> Pictures | Tensor:
        """Of a slice the pictures, of places [n] the numbers."""
        if isinstance(key, slice):
            return Pictures(self.files[key], self.side, self.where)
        return self._numbers([self.files[place] for place in key.tolist()])

    def split(self, size: int) -> Iterator[Tensor]:
        """All numbers, ``size`` pictures at a time."""
        return (self._numbers(self.files[first : first + size]) for first in range(0, len(self.files), size))

    def part(self, places: Tensor) -> Pictures:
        """The pictures at these places [n]."""
        return Pictures([self.files[place] for place in places.tolist()], self.side, self.where)

    def _numbers(self, files: Sequence[Path]) -> Tensor:
        with ThreadPoolExecutor() as threads:
            squares = list(threads.map(self._square, files))
        return torch.from_numpy(np.stack(squares)).to(self.where).permute(0, 3, 1, 2) / 127.5 - 1

    def _square(self, file: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        try:
            with Image.open(file) as image:
                factor = SHORTER * self.side / min(image.size)
                width, height = (max(self.side, round(length * factor)) for length in image.size)
                left, top = (width - self.side) // 2, (height - self.side) // 2
                image.draft("RGB", (width, height))
                whole = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
                return np.asarray(whole.crop((left, top, left + self.side, top + self.side)))
        except OSError as error:
            raise UserError(f"{file}: no image that can be read ({error}); fetch it again or remove it") from None


def found(folder: Path, side: int, classes: int, source: str) -> list[tuple[Pictures, Tensor]]:
    """Of ``folder``/train and /val the pictures and their classes [n], which are numbered as their folders' names are sorted.

    Raises UserError, which says ``source``, where a folder is missing or another number of classes is there.
    """
    parts, names = [], None
    for part in ("train", "val"):
        here = sorted(path.name for path in (folder / part).glob("*/"))
        if len(here) != classes or (names is not None and here != names):
            raise UserError(f"{folder / part}: {len(here)} folders of classes, {classes} are needed, the same in train and val; {source}")
        names = here
        files = [sorted(path for path in (folder / part / name).iterdir() if path.is_file()) for name in here]
        numbers = torch.tensor([number for number, some in enumerate(files) for _ in some])
        parts.append((Pictures([file for some in files for file in some], side), numbers))
    return parts


def dataset(folder: Path, name: str, labels: tuple[str, ...]) -> list[Any]:
    """Training and test part of a data set of images, `datasets.Dataset` with the columns image and label.

    Read from ``folder`` where it is there (what save_to_disk wrote, parquet files, or a folder a part with a folder a class in it), else
    from the Hub by ``name``. labels: the label's column, the first of these that there is.

    Raises:
        UserError: the package is not installed, the data are not here, or are of another form.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{name}: {error}; pip install -e .[eval]") from None
    try:
        saved = (folder / "dataset_dict.json").exists()
        found = datasets.load_from_disk(folder) if saved else datasets.load_dataset(str(folder) if folder.is_dir() else name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        told = f"neither {folder} nor the Hub's {name} could be read: {str(error).splitlines()[0]}"
        raise UserError(f"{told}; fetch it into that folder (huggingface-cli download --repo-type dataset {name} --local-dir)") from None
    test = next((part for part in ("test", "validation") if part in found), None)
    if "train" not in found or test is None:
        raise UserError(f"{folder}: parts {', '.join(found)}; train and test (or validation) are needed")
    made = []
    for part in (found["train"], found[test]):
        image = next((key for key, feature in part.features.items() if isinstance(feature, datasets.Image)), None)
        label = next((key for key in labels if key in part.features), None)
        if image is None or label is None:
            raise UserError(f"{folder}: columns {', '.join(part.features)}; an image and one of {', '.join(labels)} are needed")
        made.append(part.select_columns([image, label]).rename_columns({image: "image", label: "label"}))
    return made
