"""Model files: their formats, descriptions and parts, read and written without running them."""
