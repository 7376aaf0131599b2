"""optimize(): a file for the processors of one machine, whose norms work in the layout of its convolutions."""
