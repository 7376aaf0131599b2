"""The text of a model card. It states what the file, its certificate and its settings say, and nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nnorm_export.files.inspection import LayerDescription, ModelDescription
from nnorm_export.files.tuned import Tuned
from nnorm_export.names import escaped
from nnorm_export.parity.verdict.outcome import share_text
from nnorm_export.publishing.evidence import Certified
from nnorm_export.publishing.markdown import code, fenced, table, text
from nnorm_export.publishing.metadata import Metadata, metadata_text
from nnorm_export.tuning.candidates import options_text

PLOT = "lambdas.png"
_VERSIONS = ("nnorm_export", "torch", "onnxruntime", "onnxruntime-gpu", "python", "machine")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a card is about.

    Attributes:
        model: the name of the ONNX file in the folder.
        files: name of a file in the folder -> (bytes, SHA-256).
        certified: None without a certificate; ``certificate`` is the name of its copy, empty if there is none.
        tuned: None without settings; ``settings`` is the name of their copy.
        introduction: Markdown of the author.
        has_plot: whether the folder has :data:`PLOT`.
    """

    given: Metadata
    description: ModelDescription
    model: str
    files: Mapping[str, tuple[int, str]]
    certified: Certified | None = None
    certificate: str = ""
    tuned: Tuned | None = None
    settings: str = ""
    introduction: str = ""
    has_plot: bool = False

    def address(self, name: str) -> str:
        return f"hf://{self.given.repository}/{name}"


def card_text(contents: Contents) -> str:
    """The card: metadata, then Markdown."""
    metric = None if contents.certified is None else contents.certified.metric
    head = metadata_text(contents.given, contents.description, metric)
    sections = [_beginning, _loading, _normalizations, _parity, _speed, _checking, _files]
    parts = [part for section in sections for part in section(contents)]
    return head + "\n" + "\n\n".join(parts) + "\n"


def _beginning(contents: Contents) -> Iterator[str]:
    description = contents.description
    yield f"# {text(contents.given.repository.partition('/')[2])}"
    if contents.introduction:
        yield contents.introduction.strip("\n")
    form = f" in the form {code(description.form)}" if description.form else ""
    count = len(description.layers)
    yield (
        f"{code(contents.model)} is an ONNX file{form} with {count} normality normalization{'s' * (count != 1)}, "
        f"written by {text(description.producer)}."
    )
    rows = [["opset", text(f"{description.opset}, IR version {description.ir_version}")]]
    rows += [["input", code(description.described(info))] for info in description.inputs]
    rows += [["output", code(description.described(info))] for info in description.outputs]
    rows += [["quantized", text(description.quantization)]] if description.quantization else []
    rows += [["for", text(description.optimized_for)]] if description.optimized_for else []
    rows += [["batch", text(description.least_batch)]] if description.least_batch else []
    rows += [[text(key), text(value)] for key, value in description.metadata.items()]
    yield table(["", ""], rows)


def _loading(contents: Contents) -> Iterator[str]:
    description = contents.description
    yield "## How to load"
    names = ", ".join(_name(info.name) for info in description.inputs)
    yield fenced(
        "python",
        f"import nnorm_export\n\nrunner = nnorm_export.load({_name(contents.address(contents.model))})\n"
        f"outputs = runner({names and '...'})  # inputs: {names}",
    )
    yield "`pip install 'nnorm_export[hub,onnxruntime]'` installs what this needs. In ONNX Runtime alone:"
    lines = ["import huggingface_hub", "import onnxruntime", ""]
    lines += [f"folder = huggingface_hub.snapshot_download({_name(contents.given.repository)})"]
    needs_kernels = description.form in ("custom", "optimized")
    if needs_kernels:
        lines.insert(1, "import nnorm_export")
        lines += ["options = onnxruntime.SessionOptions()", "nnorm_export.register(options)  # the kernels"]
    if description.form == "optimized":
        lines += [
            "level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL",
            "options.graph_optimization_level = level  # the graph is final",
        ]
    options = ", options" if needs_kernels else ""
    lines += [f"session = onnxruntime.InferenceSession(folder + {_name('/' + contents.model)}{options})"]
    yield fenced("python", "\n".join(lines))
    if needs_kernels:
        yield "Only kernels or plugins of `nnorm_export` run this file."


def _normalizations(contents: Contents) -> Iterator[str]:
    layers = contents.description.layers
    if not layers:
        return
    yield "## Normalizations"
    if contents.has_plot:
        yield f"![λ of the normalizations]({PLOT})"
    yield (
        "λ is the parameter of the power transform. At λ = 1 the transform is the identity; at 0 and 2 one half of it "
        "is a logarithm."
    )
    rows = [[code(layer.name), code(layer.op_type), *_layer_cells(layer)] for layer in layers]
    yield table(["layer", "operator", "size", "λ", "variant", "ε"], rows)


def _layer_cells(layer: LayerDescription) -> list[str]:
    size = layer.normalized_shape or layer.channels
    groups = f" in {layer.num_groups}" if layer.num_groups else ""
    if layer.variant is None:
        lambdas = "-"
    elif layer.lambda_range is None:
        lambdas = "from each input"
    else:
        lambdas = " to ".join(f"{value:.3g}" for value in layer.lambda_range)
    epsilon = "-" if layer.epsilon is None else f"{layer.epsilon:g}"
    return [text(cell) for cell in ("-" if size is None else f"{size}{groups}", lambdas, layer.variant or "-", epsilon)]


def _parity(contents: Contents) -> Iterator[str]:
    yield "## Parity with PyTorch"
    found = contents.certified
    if found is None:
        yield "This card has no certificate: it does not say whether the file computes what PyTorch computes."
        return
    versions = ", ".join(f"{name} {found.versions[name]}" for name in _VERSIONS if name in found.versions)
    yield f"As recorded in a certificate of this file, in the runtime {text(found.runtime)} ({text(versions)})."
    yield f"Criterion: {text(found.criterion)}."
    rows = [
        [
            code(output.name),
            text(share_text(output.allowed_share)),
            text(f"{output.max_abs_diff:.1e}"),
            "-" if output.top1_agreement is None else text(f"{output.top1_agreement:.2%}"),
            text(output.rows),
            text(output.verdict + (", which does not decide" if found.by_metric_alone and not output.passed else "")),
        ]
        for output in found.outputs
    ]
    yield table(["output", "error / allowed", "max abs", "top-1", "rows", ""], rows)
    if found.given_only:
        yield f"Note: {text(found.given_only)}"
    if (metric := found.metric) is not None:
        yield f"Metric {code(metric.name)}: {text(metric.measured)}. {text(metric.note)}".rstrip()


def _speed(contents: Contents) -> Iterator[str]:
    yield "## Speed"
    tuned = contents.tuned
    if tuned is None:
        yield "The speed was not measured for this card."
        return
    winner = tuned.measured["winner"]
    p99 = winner.get("p99")
    tail = f"; 99 % of the calls take at most {p99:.3g} ms" if isinstance(p99, float) else ""
    rows = f"{tuned.batch} row{'s' * (tuned.batch > 1)}"
    sentence = (
        f"a call of {rows} takes {winner['milliseconds']:.3g} ms{tail}. That is {winner['ratio']:.2f} times the time "
        f"of {tuned.source or 'the model'} as load opens it."
    )
    yield (
        f"Measured on {text(tuned.processor)}, {text(tuned.cores)} cores, with {code(tuned.file.name)} in the runtime "
        f"{text(tuned.runtime)} ({text(options_text(tuned.options))}): {text(sentence)} Other machines have other "
        "times."
    )
    yield fenced(
        "python", f"runner = nnorm_export.load({_name(contents.address(contents.settings))})  # with these settings"
    )


def _checking(contents: Contents) -> Iterator[str]:
    if not contents.certificate:
        return
    yield "## How to check"
    addresses = [shlex.quote(escaped(contents.address(name))) for name in (contents.model, contents.certificate)]
    yield "This compares the file on your machine with the results of PyTorch in the certificate, without PyTorch:"
    yield fenced("sh", f"nnorm-export verify {addresses[0]} --replay {addresses[1]}")


def _files(contents: Contents) -> Iterator[str]:
    yield "## Files"
    within = f"{contents.certificate}/"
    of_certificate = [name for name in contents.files if contents.certificate and name.startswith(within)]
    rows = [
        [code(name), text(f"{size:,}"), code(digest)]
        for name, (size, digest) in contents.files.items()
        if name not in of_certificate
    ]
    yield table(["file", "bytes", "SHA-256"], rows)
    if of_certificate:
        yield f"{code(contents.certificate)} is the certificate, of {len(of_certificate)} files."


def _name(name: str) -> str:
    """``name`` as a string of Python."""
    return escaped(json.dumps(name, ensure_ascii=False))
