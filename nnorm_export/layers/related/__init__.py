"""The normalizations that the papers compare normality normalization with."""
