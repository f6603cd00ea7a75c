"""A data set on disk as a tensorclass, read by the workers of a DataLoader."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from tensordict import MemoryMappedTensor, NonTensorData, TensorClass, TensorDict, tensorclass
from torch.utils.data import DataLoader

COUNT = 96


@tensorclass
class Box:
    """Corner and extent of a rectangle in an image, in pixels."""

    corner: torch.Tensor
    extent: torch.Tensor

    @property
    def area(self) -> torch.Tensor:
        """Number of pixels in the rectangle."""
        return self.extent.prod(-1)


class Sample(TensorClass):
    """Images with a label and a box."""

    image: torch.Tensor
    label: torch.Tensor
    box: Box
    source: str = "drawn"

    @classmethod
    def draw(cls, count: int) -> Sample:
        """Build images with one bright box each."""
        extent = torch.randint(2, 6, (count, 2))
        corner = torch.randint(0, 10, (count, 2))
        image = torch.zeros(count, 16, 16, dtype=torch.uint8)
        for row, (y, x), (height, width) in zip(image, corner.tolist(), extent.tolist()):
            row[y : y + height, x : x + width] = 255
        box = Box(corner=corner, extent=extent, batch_size=[count])
        return cls(image=image, label=box.area % 3, box=box, batch_size=[count])


class Collate:
    """Collate function for a data set whose indexing returns whole batches; converts images to floats."""

    def __call__(self, batch: Sample) -> Sample:
        """Return a copy of the batch with float images in [0, 1]."""
        batch = batch.clone()
        batch.image = batch.image.float() / 255
        return batch


def main(folder: Path) -> None:
    """Write the data set, read it in batches, and print both."""
    torch.manual_seed(0)
    written = Sample.draw(COUNT).memmap(folder)
    data = Sample.load_memmap(folder)
    print(type(data).__name__, data.batch_size, len(data), type(data.box).__name__, data.source)
    print(
        "on disk:",
        isinstance(data.image, MemoryMappedTensor),
        isinstance(data.box.extent, MemoryMappedTensor),
    )
    print(
        "same:",
        bool((data.image == written.image).all()),
        bool((data.box.corner == written.box.corner).all()),
    )

    loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2, collate_fn=Collate())
    pixels = torch.zeros((), dtype=torch.float64)
    labels = []
    for batch in loader:
        assert isinstance(batch, Sample)
        assert isinstance(batch.box, Box)
        print(
            f"batch {tuple(batch.shape)} {batch.image.dtype} {batch.source}, area {batch.box.area.sum().item()}"
        )
        pixels += batch.image.sum()
        labels.append(batch.label)
    print("pixels:", pixels.item(), "labels:", torch.cat(labels).bincount().tolist())

    first, second = data[:2].unbind(0)
    both = torch.stack([first, second])
    print("stacked:", type(both).__name__, both.shape, both.box.area.tolist(), first.label.shape)
    large = data[data.box.area > 12]
    print("large:", len(large), type(large).__name__, large.box.extent.float().mean(0).tolist())
    view = data[:64].view(8, 8)
    print("view:", view.shape, view.box.shape, view.image.shape)

    plain = data[:3].to_tensordict()
    print(
        "plain:", type(plain).__name__, sorted(plain.keys()), isinstance(plain.get("source"), NonTensorData)
    )
    renamed = Sample(
        image=data.image[:1], label=data.label[:1], box=data.box[:1], source="copied", batch_size=[1]
    )
    print("changed:", renamed.source, renamed.to_tensordict()["source"])
    renamed.source = "again"
    extra = TensorDict({"sample": renamed, "weight": torch.ones(1)}, [1])
    print(
        "inside:",
        type(extra["sample"]).__name__,
        extra["sample", "source"],
        extra["sample", "box", "extent"].shape,
    )
    try:
        renamed.colour = "red"
    except AttributeError:
        print("no such field")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary) / "boxes")
