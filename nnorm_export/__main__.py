"""``python -m nnorm_export``: the command line."""

from nnorm_export.cli import main

if __name__ == "__main__":
    main()
