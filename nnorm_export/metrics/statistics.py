"""What a built-in metric keeps of each sample, from which it is computed again for any weights of the samples.

A bootstrap resample of n samples is a weight for each sample: how often it was drawn. All resamples then are one matrix
product, or one histogram each, and the outputs are not read again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nnorm_export.dtypes import Array


class Statistics(ABC):
    """The statistics of a metric, sample by sample."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of samples."""

    @abstractmethod
    def weighted(self, weights: Array) -> Array:
        """The metric with the samples weighted by each row of ``weights``, [B, N]; returns [B]."""

    @property
    def value(self) -> float:
        """The metric of all samples."""
        return float(self.weighted(np.ones((1, self.count)))[0])

    @property
    def outcomes(self) -> Array | None:
        """The outcome of each sample, if the metric is the mean of outcomes that are 0 or 1."""
        return None


@dataclass(frozen=True)
class Outcomes(Statistics):
    """The mean of outcomes that are true or false: Σ w·outcome / Σ w."""

    correct: Array

    @property
    def count(self) -> int:
        return len(self.correct)

    def weighted(self, weights: Array) -> Array:
        mean: Array = weights @ self.correct.astype(np.float64) / weights.sum(1)
        return mean

    @property
    def outcomes(self) -> Array:
        return self.correct


@dataclass(frozen=True)
class Sums(Statistics):
    """A function of sums over the samples: f(Σ w·row).

    Attributes:
        rows: what each sample adds to the sums, [N, K].
        of_sums: the metric of sums [B, K]; returns [B].
    """

    rows: Array
    of_sums: Callable[[Array], Array]

    @property
    def count(self) -> int:
        return len(self.rows)

    def weighted(self, weights: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.of_sums(weights @ self.rows)


@dataclass(frozen=True)
class ClassCounts(Statistics):
    """A function of three counts of each class: of correct samples, of predictions, and of labels.

    Attributes:
        labels, predictions: the class of each sample, [N]; a prediction of -1 is none.
        classes: the number of classes.
        of_counts: the metric of (correct, predicted, labeled), each [C].
    """

    labels: Array
    predictions: Array
    classes: int
    of_counts: Callable[[Array, Array, Array], float]

    @property
    def count(self) -> int:
        return len(self.labels)

    def weighted(self, weights: Array) -> Array:
        return np.array([self._of(row) for row in weights], np.float64)

    def _of(self, weights: Array) -> float:
        correct = np.where(self.labels == self.predictions, weights, 0.0)
        # The first entry of the predictions counts those that are none.
        predicted = np.bincount(self.predictions + 1, weights, self.classes + 1)[1:]
        return self.of_counts(
            np.bincount(self.labels, correct, self.classes), predicted, np.bincount(self.labels, weights, self.classes)
        )
