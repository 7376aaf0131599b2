"""A file for the processors of one machine, in which normalizations work on the layout of its convolutions."""
