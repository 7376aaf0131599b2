"""The matrix of runtimes: which of them read the files that export() writes, and whether what they compute is right.

``make test-everywhere`` writes the files of :mod:`everywhere.cases`, runs them in every runtime of
:mod:`everywhere.runtimes`, each in an environment and a process of its own, and writes
``results/everywhere.json``, ``results/everywhere.md`` and the table in the README.
"""
