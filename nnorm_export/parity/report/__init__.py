"""A comparison to show to others: one HTML page with its figures."""
