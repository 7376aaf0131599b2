"""A parity report as a table."""

from __future__ import annotations

from collections import Counter

from nnorm_export.cli._common import counted, print_facts, print_table
from nnorm_export.parity.judgement import ParityReport, share_text


def print_parity(report: ParityReport) -> None:
    print_table(
        ("output", "max abs", "max rel", "of budget", "top-1", "rows", ""),
        [
            (
                output.name,
                f"{output.max_abs_diff:.1e}",
                f"{output.max_rel_diff:.1e}",
                share_text(output.budget_share),
                "-" if output.top1_agreement is None else f"{output.top1_agreement:.2%}",
                str(output.rows),
                "equal" if output.passed else "DIFFERENT",
            )
            for output in report.outputs
        ],
        numbers=True,
    )
    print_facts([("runtime", runtime_text(report)), ("criterion", report.criterion)])


def runtime_text(report: ParityReport) -> str:
    """``onnxruntime (3 normalizations by body)``."""
    ran = counted(dict(Counter(f"by {implementation}" for implementation in report.implementations.values())))
    return f"{report.runtime} (normalizations: {ran or 'inlined'})"
