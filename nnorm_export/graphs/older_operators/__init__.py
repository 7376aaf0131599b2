"""What an operator of the standard domain is in opsets that lack it, or have another form of it.

Each rule is for the opsets before the one that it names. It changes the node in place and returns None, or returns the
values that replace the node's outputs. What it makes may be newer than the opset too: the caller takes that down next.
"""

from nnorm_export.graphs.older_operators import added, changed
from nnorm_export.graphs.older_operators.rewrite import Refused as Refused, Rewrite as Rewrite, Rules

RULES: Rules = {**changed.RULES, **added.RULES}
