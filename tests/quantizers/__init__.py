"""The matrix of quantizers: what the tools of others make of the files that export() writes.

``make test-quantizers`` quantizes the authors' networks on digits with each tool, in an environment and a process of
its own, and writes ``results/quantizers.*``. :mod:`everywhere.runtimes` starts and watches the processes.
"""
