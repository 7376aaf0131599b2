"""tune(): which file, in which runtime and with which settings, is the fastest here and still right."""
