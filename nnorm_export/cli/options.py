"""The arguments and options of the commands, each declared once.

Those that belong together are the fields of a dataclass. A command takes the dataclass as one parameter, and
:func:`grouped` shows typer one parameter for each of its fields.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeAlias

from nnorm_export.cli import panels
from nnorm_export.errors import NnormExportError
from nnorm_export.exporting.targets import listed_targets
from nnorm_export.names import OTHER_TARGETS, dtype_spelled

PROGRAM = "a .pt2 file, which carries its inputs and their shapes"
DECODER = "--decoder, which gives the example, its axes and all names"


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Returns ``command`` with a parameter for every field of the dataclasses that it takes, as typer reads them."""
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    groups: dict[str, Any] = {p.name: p.annotation for p in parameters if is_dataclass(p.annotation)}

    @functools.wraps(command)
    def with_groups(**values: Any) -> None:
        made = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **made)

    shown = [inspect.signature(groups[p.name]).parameters.values() if p.name in groups else [p] for p in parameters]
    keyword_only = [parameter.replace(kind=parameter.KEYWORD_ONLY) for group in shown for parameter in group]
    # inspect.signature() reads this attribute, which mypy does not know of functions.
    with_groups.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return with_groups


def refuse(options: Mapping[str, object], beside: str) -> None:
    """Raises the error of the first of ``options``, each with its value, that is given."""
    for option, value in options.items():
        if value:
            raise NnormExportError(f"{option} does not go with {beside}; leave it out")


def output_option(default: str) -> Any:
    return panels.file("--output -o FILE", f"The file to write; by default {default}.")


Model = Annotated[
    str,
    panels.model(
        "--model -m MODULE:FACTORY",
        "The model: package.module:factory (a function or class without required arguments, or an nn.Module), "
        "looked for in the current directory first; or a .pt2 file.",
        show_default=False,
    ),
]
Inputs = Annotated[
    list[str] | None,
    panels.inputs(
        "--input -i SPEC",
        "An example input, in forward's order or by name: 8,3,32,32 or 'x:float32[8,3,32,32]' (random), "
        "or data.npz, x:data.npy, x:data.npz:key (real data verifies better). An entry of a dict is named by its path, "
        "x.ids:int64[8]; x:data.npz:* is a dict of all arrays. Repeatable.",
    ),
]
Runtime = Annotated[
    str | None,
    panels.comparison(
        "--runtime NAME",
        "The runtime of the file; by default ONNX Runtime on the CPU, or the one of the file's format. "
        "nnorm-export doctor lists them.",
        **panels.completing("nnorm_export.runtimes:RUNTIMES"),
    ),
]
TrustPickle = Annotated[
    bool,
    panels.general("--trust-pickle", "Open a .pt2 program that runs code. Only for files from someone you trust."),
]
ExternalData = Annotated[
    bool | None,
    panels.file("--external-data/--no-external-data", "Keep the weights beside FILE; by default those over 2 GiB."),
]
KeepIoTypes = Annotated[
    bool,
    panels.onnx(
        "--keep-io-types",
        "float32 inputs and outputs of a half-precision file, with a Cast at each; what is between them stays half.",
    ),
]
NoRun = Annotated[bool, panels.output("--no-run", "Do not open the file in its runtime.")]
NoVerify = Annotated[bool, panels.output("--no-verify", "Write the file without comparing it.")]


@dataclass
class OutputOptions:
    json_output: Annotated[bool, panels.output("--json", "Print one JSON object instead of tables.")] = False
    quiet: Annotated[
        bool, panels.output("--quiet -q", "Print only errors, and notes that weights or data are random.")
    ] = False
    verbose: Annotated[bool, panels.output("--verbose -v", "Print more; tracebacks with errors.")] = False


@dataclass
class ModelSourceOptions:
    model: Model
    model_arg: Annotated[
        list[str] | None,
        panels.model("--model-arg KEY=VALUE", "An argument for the factory: a Python literal or text. Repeatable."),
    ] = None
    checkpoint: Annotated[
        str | None, panels.model("--checkpoint -c FILE", "Trained weights: .pth, .pt, .ckpt, .safetensors.")
    ] = None
    checkpoint_key: Annotated[
        str | None,
        panels.model("--checkpoint-key KEY", "The weights' key in the checkpoint, if an unusual one: ema, swa.model."),
    ] = None
    checkpoint_prefix: Annotated[
        str | None,
        panels.model(
            "--checkpoint-prefix PREFIX",
            "What the model's keys begin with in the checkpoint: model, ema_model; '' for nothing. By default the one "
            "that fits. Other keys are left.",
        ),
    ] = None
    trust_pickle: Annotated[
        bool,
        panels.model(
            "--trust-pickle", "Load a checkpoint or .pt2 file that runs code. Only for files from someone you trust."
        ),
    ] = False
    passthrough: Annotated[
        list[str] | None,
        panels.model("--passthrough CLASS", "A class like a normalization that is plain PyTorch: keep it. Repeatable."),
    ] = None


@dataclass
class ModelOptions(ModelSourceOptions):
    input_specs: Inputs = None
    decoder: Annotated[
        bool,
        panels.inputs(
            "--decoder",
            "The model is a decoder of transformers: a prompt with padding and a cache are the example, with axes and "
            "names of onnxruntime-genai (nnorm_export.decoder_arguments).",
        ),
    ] = False


@dataclass
class OptionalModelOptions(ModelOptions):
    model: Model = ""


@dataclass
class ReferenceOptions(ModelSourceOptions):
    model: Model = ""


@dataclass
class ExportOptions:
    dynamic: Annotated[
        list[str] | None,
        panels.inputs(
            "--dynamic SPEC",
            "Dynamic axes in place of the batch: x:0=batch,1=seq or, with a range, 'x:1=seq[2..512]'. Axes of one name "
            "have one length; all others are fixed. Repeatable.",
        ),
    ] = None
    fixed_shape: Annotated[bool, panels.inputs("--fixed-shape", "Fix every axis. By default the batch is dynamic.")] = (
        False
    )
    input_names: Annotated[str | None, panels.inputs("--input-names A,B", "Names of the inputs in the file.")] = None
    output_names: Annotated[str | None, panels.inputs("--output-names A,B", "Names of the outputs in the file.")] = None
    output: Annotated[str | None, output_option("model with the ending of the format: model.onnx")] = None
    target: Annotated[
        str | None,
        panels.file(
            "--target -t NAME",
            "The runtime or the format that the file is for, which decides the form, opset and shapes: "
            f"{listed_targets()}.",
            **panels.one_of("nnorm_export.exporting.targets:TARGETS", OTHER_TARGETS),
        ),
    ] = None
    dtype: Annotated[
        str | None,
        panels.file(
            "--dtype TYPE",
            "fp32, fp16, bf16 or fp64, or PyTorch's names: float16, half; the model's own by default.",
            **panels.one_of(
                "nnorm_export.names:DTYPE_NAMES",
                {"int8": "Files in int8 are made by nnorm-export quantize."},
                dtype_spelled,
            ),
        ),
    ] = None
    external_data: ExternalData = None
    keep_io_types: KeepIoTypes = False
    metadata: Annotated[
        list[str] | None,
        panels.file("--metadata KEY=TEXT", "A text that the file keeps and inspect shows: author=Ada. Repeatable."),
    ] = None
    form: Annotated[
        str | None,
        panels.onnx(
            "--form FORM",
            "portable (default): nodes with bodies. primitives: standard operators only, for runtimes without "
            "functions. custom: nodes without bodies, needs a kernel or plugin.",
            **panels.one_of("nnorm_export.names:FORMS"),
        ),
    ] = None
    opset: Annotated[
        int | None,
        panels.onnx(
            "--opset N",
            "ONNX opset, 11 or newer; 20, the default, runs on ONNX Runtime 1.18 (bf16: 22). Before 18, for older "
            "runtimes, the form is primitives.",
        ),
    ] = None
    method: Annotated[
        str | None,
        panels.pytorch(
            "--method METHOD",
            "trace (default): what the model does with the example. script: the model's own code with its branches.",
            **panels.one_of("nnorm_export.names:TORCHSCRIPT_METHODS"),
        ),
    ] = None
    no_optimize: Annotated[
        bool, panels.pytorch("--no-optimize", "Keep modules and parameters in TorchScript instead of folding them.")
    ] = False
    operators: Annotated[
        str | None,
        panels.pytorch(
            "--operators HOW",
            "decomposed (default): a .pt2 that needs PyTorch alone. kept: operators of torch.ops.nnorm.",
            **panels.one_of("nnorm_export.names:PT2_OPERATORS"),
        ),
    ] = None
    inductor_config: Annotated[
        list[str] | None,
        panels.pytorch("--inductor-config KEY=VALUE", "An option of Inductor for aoti: a literal or text. Repeatable."),
    ] = None
    genai: Annotated[
        str | None,
        panels.onnx(
            "--genai IMPLEMENTATION",
            "With --decoder, also write genai_config.json beside FILE, for onnxruntime-genai. bodies: the folder needs "
            "no library. kernels: with a copy of the library of kernels.",
            **panels.one_of("nnorm_export.names:GENAI"),
        ),
    ] = None
    strict: Annotated[
        bool,
        panels.general("--strict", "Refuse unknown norms, naming all, and a file compared on the given inputs only."),
    ] = False
    no_verify: NoVerify = False


Where: TypeAlias = Annotated[
    list[str] | None,
    panels.comparison(
        "--where [OUTPUT:]INPUT",
        "Compare an output, or all, only where this input is not 0: logits:attention_mask. Repeatable.",
    ),
]


@dataclass
class VerifyOptions:
    url: Annotated[
        str | None,
        panels.general(
            "--url URL",
            "Instead of a file, a model on a server (KServe v2): http://HOST:8000/MODEL or grpc://HOST:8001/MODEL.",
        ),
    ] = None
    timeout: Annotated[
        float | None, panels.general("--timeout SECONDS", "With --url, how long a call may take in all; by default 60.")
    ] = None
    runtime: Runtime = None
    criterion: Annotated[
        str | None,
        panels.comparison(
            "--criterion NAME",
            "budget (default); allclose: torch.testing's tolerances for the dtype, or --rtol and --atol; or metric: "
            "--metric alone decides, for int8.",
            **panels.one_of("nnorm_export.parity.verdict.criteria:CRITERIA"),
        ),
    ] = None
    rtol: Annotated[
        list[str] | None,
        panels.comparison(
            "--rtol [OUTPUT:]X",
            "Relative tolerance, in place of the error budget, of one output or of all. Without --atol, atol is 0 and "
            "elements near 0 fail: give both. Repeatable.",
        ),
    ] = None
    atol: Annotated[
        list[str] | None, panels.comparison("--atol [OUTPUT:]X", "Absolute tolerance, as --rtol. Repeatable.")
    ] = None
    statistic: Annotated[
        list[str] | None,
        panels.comparison(
            "--statistic [OUTPUT:]NAME",
            "What decides over the elements' errors: max (default), mean, median, or a percentile: p99. Repeatable.",
        ),
    ] = None
    where: Where = None
    float16: Annotated[
        bool,
        panels.comparison("--float16", "List the normalizations that float16 puts at risk on these inputs, and why."),
    ] = False
    probes: Annotated[
        bool, panels.comparison("--probes", "Also run every normalization on inputs and λ that reach all its branches.")
    ] = False
    record: Annotated[
        str | None,
        panels.certificate("--record DIR", "If it passes, write a certificate: inputs, outputs, hashes, versions."),
    ] = None
    replay: Annotated[
        str | None,
        panels.certificate(
            "--replay DIR|FILE",
            "Compare with a certificate; needs neither PyTorch nor the model's code. Its folder, the in-toto statement "
            "certificate.json in it, or a BOM of it.",
        ),
    ] = None
    bom: Annotated[
        str | None,
        panels.certificate(
            "--bom FILE.cdx.json",
            "With --record or --replay, if it passes: write a CycloneDX ML-BOM that refers to the certificate, with "
            "the hashes of the file, the checkpoint and the data, and the versions.",
        ),
    ] = None
    sign_with: Annotated[
        str | None,
        panels.certificate(
            "--sign-with KEY.pem", "With --record: sign the file and its certificate with this private key (OpenSSF)."
        ),
    ] = None
    public_key: Annotated[
        str | None,
        panels.certificate(
            "--public-key PUB.pem", "With --replay: first check the signature of the file and the certificate."
        ),
    ] = None
    exact: Annotated[
        bool,
        panels.certificate(
            "--exact", "With --replay: also every bit, and the normalization that first has others than were recorded."
        ),
    ] = False
    page: Annotated[
        str | None, panels.output("--report FILE.html", "Write a page with the error of each layer, λ, what ran where.")
    ] = None


@dataclass
class BisectOptions:
    runtime: Runtime = None
    layer: Annotated[
        list[str] | None,
        panels.comparison(
            "--layer PATH", "Another layer to compare, by its path in the model: layer1.0.conv1. Repeatable."
        ),
    ] = None
    where: Where = None
    exact: Annotated[
        str | None,
        panels.comparison(
            "--exact WITH",
            "Compare bits, not with PyTorch but with another run: a certificate, a folder that verify --record "
            "wrote here or on another machine, or another runtime. It takes no --model.",
        ),
    ] = None
    plot: Annotated[str | None, panels.output("--plot FILE", "Draw the errors of every layer: .png, .svg or .pdf.")] = (
        None
    )
