"""``nnorm-export card``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nnorm_export.cli.file_options import CardOptions
from nnorm_export.cli.output import Output, shown
from nnorm_export.errors import InputError


def card(
    path: Annotated[str, typer.Argument(metavar="MODEL.onnx", help="An ONNX file, whoever wrote it.")],
    options: CardOptions,
    output: Output,
) -> None:
    """Write a folder for the Hugging Face Hub: the file with its model card.

    The card has the metadata of the Hub, the λ of each normalization, parity
    with PyTorch as a certificate has it, the speed that tune measured, how to
    load the file, and the SHA-256 of each file. Where a certificate or the
    speed is missing, the card says so. Nothing is uploaded:

      hf upload owner/name FOLDER

    The certificate in the folder has the inputs that the file was compared on:
    with them, others can check the file. --no-certificate-copy leaves it out.

    Examples:

      nnorm-export card net.onnx --repository owner/net --license mit -o card

      nnorm-export card net.onnx --repository owner/net -o card \\
        --certificate net.parity --tuned net.tuned.json \\
        --pipeline-tag image-classification --evaluated-on owner/data
    """
    from nnorm_export.publishing.write_card import write_card
    from nnorm_export.reading import read_bytes

    introduction = ""
    if options.introduction is not None:
        try:
            introduction = read_bytes(options.introduction, _MOST_BYTES, InputError).decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{options.introduction}: not text in UTF-8; save it as that") from error
    with output.working(f"Writing {options.output}"):
        written = write_card(
            path,
            Path(options.output),
            options.repository,
            certificate=options.certificate,
            tuned=options.tuned,
            introduction=introduction,
            license_id=options.license_id,
            pipeline_tag=options.pipeline_tag,
            base_model=options.base_model or (),
            datasets=options.datasets or (),
            evaluated_on=options.evaluated_on,
            copy_certificate=not options.no_certificate_copy,
            plot=not options.no_plot,
        )
    output.notices(written.notes)

    def print_text() -> None:
        typer.echo(f"wrote {shown(options.output)}: README.md and {len(written.files)} files")
        if output.verbose:
            typer.echo("\n".join(shown(line) for line in written.text.split("\n")))

    output.show(written.to_json(), print_text)


_MOST_BYTES = 2**20  # of an introduction
