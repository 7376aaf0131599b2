"""ResNet50 for images of ImageNet's size, with any class of normalization, as in benchmarks/models.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from benchmarks.models import Norm


class Bottleneck(nn.Module):
    def __init__(self, channels_in: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        channels_out = 4 * width
        self.narrow = nn.Sequential(nn.Conv2d(channels_in, width, 1, bias=False), norm(width), nn.ReLU())
        self.spatial = nn.Sequential(nn.Conv2d(width, width, 3, stride, padding=1, bias=False), norm(width), nn.ReLU())
        self.wide = nn.Sequential(nn.Conv2d(width, channels_out, 1, bias=False), norm(channels_out))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), norm(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return (self.wide(self.spatial(self.narrow(x))) + self.shortcut(x)).relu()


class ResNet50(nn.Module):
    """Images [N, 3, H, W] to logits [N, 1000]; 53 normalizations."""

    def __init__(self, norm: Norm, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False), norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        )
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for index in range(count):
                stages.append(Bottleneck(channels, width << stage, 2 if index == 0 and stage > 0 else 1, norm))
                channels = 4 * (width << stage)
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))
