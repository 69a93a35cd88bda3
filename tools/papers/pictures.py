"""Image data that are decoded lazily, from a `datasets.Dataset`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fem_common.errors import UserError

SHORTER = 8 / 7  # shorter side before cropping / side of the crop: 256 for 224


class Pictures:
    """Inputs of `training.Examples`: [n, 3, side, side], float32 from -1 to 1, the central square
    of each image.

    source: a `datasets.Dataset` whose column image is not decoded; places: a selection of its rows
    (default: all). ImageNet-100 would need 76 GB as numbers. Decoding releases Python's lock,
    so threads share it.
    """

    def __init__(
        self,
        source: Any,
        side: int,
        where: torch.device | str = "cpu",
        places: Sequence[int] | None = None,
    ) -> None:
        self.source, self.side, self.where = source, side, where
        self.places = range(len(source)) if places is None else places

    def __len__(self) -> int:
        return len(self.places)

    def to(self, where: torch.device | str) -> Pictures:
        """Return the same images, whose decoded tensors are created on device ``where``."""
        return Pictures(self.source, self.side, where, self.places)

    def __getitem__(self, key: Tensor | slice) -> Pictures | Tensor:
        """Return `Pictures` for a slice, or the decoded tensor for a tensor of positions [n]."""
        if isinstance(key, slice):
            return Pictures(self.source, self.side, self.where, self.places[key])
        return self._numbers([self.places[place] for place in key.tolist()])

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield all images as decoded tensors, ``size`` images at a time."""
        return (
            self._numbers(self.places[first : first + size]) for first in range(0, len(self), size)
        )

    def part(self, places: Tensor) -> Pictures:
        """Return the images at these positions [n]."""
        return Pictures(
            self.source, self.side, self.where, [self.places[place] for place in places.tolist()]
        )

    def _numbers(self, places: Sequence[int]) -> Tensor:
        given = [
            BytesIO(image["bytes"]) if image["bytes"] else image["path"]
            for image in self.source[list(places)]["image"]
        ]
        with ThreadPoolExecutor() as threads:
            squares = list(threads.map(self._square, given, places))
        return torch.from_numpy(np.stack(squares)).to(self.where).permute(0, 3, 1, 2) / 127.5 - 1

    def _square(
        self, given: BytesIO | str, place: int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        try:
            with Image.open(given) as image:
                factor = SHORTER * self.side / min(image.size)
                width, height = (max(self.side, round(length * factor)) for length in image.size)
                left, top = (width - self.side) // 2, (height - self.side) // 2
                image.draft("RGB", (width, height))
                full = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
                return np.asarray(full.crop((left, top, left + self.side, top + self.side)))
        except OSError as error:
            what = f"image {place} of the data set" if isinstance(given, BytesIO) else given
            raise UserError(
                f"{what}: the image cannot be read ({error}); download it again or remove it"
            ) from None


def found(folder: Path, side: int, classes: int, name: str) -> list[tuple[Pictures, Tensor]]:
    """Return the images and their classes [n] of the training and the test part (see `dataset`).

    Raises UserError if a part does not have exactly these classes.
    """
    made = []
    for part in dataset(folder, name, ("label",), decoded=False):
        numbers = torch.tensor(list(part["label"]))
        check_classes(f"{folder}, or {name} on the Hub", numbers, classes)
        made.append((Pictures(part, side), numbers))
    return made


def check_classes(where: str, numbers: Tensor, classes: int) -> None:
    """Raise UserError unless the numbers are exactly ``classes`` classes from 0."""
    found = numbers.unique().tolist()
    if found != list(range(classes)):
        raise UserError(
            f"{where}: {len(found)} classes from {found[0]} to {found[-1]}; expected {classes} from"
            " 0 on"
        )


def dataset(folder: Path, name: str, labels: tuple[str, ...], *, decoded: bool = True) -> list[Any]:
    """Return training and test part of a data set of images, `datasets.Dataset` with the columns
    image and label; ``decoded``, or bytes.

    Reads ``folder`` if it exists (written by save_to_disk, parquet files, or one folder per part
    with one folder per class), else the Hub by ``name``. labels: candidates for the column of the
    label, the first existing one is used.

    Raises:
        UserError: the package is not installed, the data are missing, or have another form.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{name}: {error}; pip install -e .[eval]") from None
    try:
        if (folder / "dataset_dict.json").exists():
            found = datasets.load_from_disk(folder)
        else:
            found = datasets.load_dataset(str(folder) if folder.is_dir() else name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        title = (
            f"neither {folder} nor {name} on the Hub could be read:"
            f" {(str(error) or repr(error)).splitlines()[0]}"
        )
        raise UserError(
            f"{title}; hf download {name} --repo-type dataset --local-dir {folder}"
        ) from None
    test = next((part for part in ("test", "validation") if part in found), None)
    if "train" not in found or test is None:
        raise UserError(
            f"{folder}: parts {', '.join(found)}; expected train and test (or validation)"
        )
    made = []
    for part in (found["train"], found[test]):
        image = next(
            (key for key, feature in part.features.items() if isinstance(feature, datasets.Image)),
            None,
        )
        label = next((key for key in labels if key in part.features), None)
        if image is None or label is None:
            raise UserError(
                f"{folder}: columns {', '.join(part.features)}; expected an image and one of"
                f" {', '.join(labels)}"
            )
        chosen = part.select_columns([image, label]).rename_columns(
            {image: "image", label: "label"}
        )
        made.append(chosen.cast_column("image", datasets.Image(decode=decoded)))
    return made
