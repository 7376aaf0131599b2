"""A user's own module: its layers have nothing of the authors' but their name, attributes and formula."""

import math

import torch
from torch import nn

print("a print of the user's own")


class BatchNormalNorm2d(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.num_features, self.eps, self.noise_train = channels, 1e-5, 0.4
        self.standardize = self.affine = self.track_running_stats = True
        self.num_batches_tracked, self.factor = 3, 1.0
        for name in ("running_lmbda", "running_mean", "running_var", "running_norm"):
            self.register_buffer(name, torch.rand(channels) + 0.5)
        self.bias, self.weight = (nn.Parameter(torch.rand(channels)) for _ in range(2))

    def forward(self, x):
        if self.factor != 1 and (x.ndim < 4 or x.shape[-1] < 4):
            raise ValueError("too small an image")
        lmbda, mean, var, weight, bias = (
            value.view(-1, 1, 1)
            for value in (self.running_lmbda, self.running_mean, self.running_var, self.weight, self.bias)
        )
        h = (x - mean) / torch.sqrt(var + self.eps)
        sign = torch.where(h < 0, -1.0, 1.0).to(h.dtype)
        eta = 1 + sign * (lmbda - 1)
        eta = eta + torch.sign(eta) * math.sqrt(self.eps)
        return self.factor * (sign * ((1 + h.abs()) ** eta - 1) / eta * weight + bias)


class BatchNormRenamed2d(BatchNormalNorm2d):
    """A subclass counts as its base."""


class AnotherFormula(BatchNormalNorm2d):
    """What freeze() cannot see: it tries layers on small inputs, and this one does not run on them."""

    def __init__(self, channels):
        super().__init__(channels)
        self.factor = 1.01


class MyNorm(nn.Module):
    def forward(self, x):
        return x / 2


class Net(nn.Module):
    def __init__(self, width=4, norm=BatchNormRenamed2d):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, width, 3), norm(width), nn.Linear(width, 5)

    def forward(self, images):
        return self.fc(self.norm(self.conv(images)).relu().mean((2, 3)))


class Two(nn.Module):
    def forward(self, x, ids):
        return {"sum": x + ids.to(x.dtype), "ids": ids + 1}


def build(width=4):
    return Net(width)


class Noisy(Net):
    """Drops values in evaluation too."""

    def forward(self, images):
        return nn.functional.dropout(super().forward(images))


def plain():
    return Net(norm=nn.BatchNorm2d)


def another_formula(norm=None):
    return Net(norm=AnotherFormula)


def own_norm():
    return Net(norm=lambda width: MyNorm())


class Reading(nn.Module):
    """Reads a file that is not there."""

    def forward(self, x):
        with open("missing.txt") as file:
            return x + len(file.read())


class Masked(nn.Module):
    """Takes sequences of any number and length."""

    def forward(self, x, mask):
        kept = x * mask[..., None]
        return kept - kept.mean((1, 2), keepdim=True)


class FromDict(Masked):
    """Takes its inputs as one dict."""

    def forward(self, batch, scale=1.0):
        return super().forward(batch["x"], batch["mask"]) * scale


class Windowed(nn.Module):
    """Takes sequences of six values and more."""

    def forward(self, x):
        return nn.functional.avg_pool1d(x, 6, 1) * 2


class Difference(nn.Module):
    def forward(self, batch):
        return batch["a"] - batch["b"]
