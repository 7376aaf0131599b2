"""The arguments and options of the commands, each declared once.

Those that belong together are the fields of a dataclass. A command takes the dataclass as one parameter, and
:func:`grouped` shows typer one parameter for each of its fields.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any

import typer


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Returns ``command`` with a parameter for every field of the dataclasses that it takes, as typer reads them."""
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    groups: dict[str, Any] = {p.name: p.annotation for p in parameters if is_dataclass(p.annotation)}

    @functools.wraps(command)
    def with_groups(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    shown = [inspect.signature(groups[p.name]).parameters.values() if p.name in groups else [p] for p in parameters]
    keyword_only = [parameter.replace(kind=parameter.KEYWORD_ONLY) for group in shown for parameter in group]
    # inspect.signature() reads this attribute, which mypy does not know of functions.
    with_groups.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return with_groups


def _panel(name: str | None) -> Callable[..., Any]:
    """Returns a function that declares an option of a panel of ``--help``.

    It takes the option's flags and metavar (``--checkpoint -c FILE``), its help, and settings of typer.Option.
    """

    def option(words: str, text: str, **settings: Any) -> Any:
        flags = [word for word in words.split() if word.startswith("-")]
        metavar = next((word for word in words.split() if not word.startswith("-")), None)
        return typer.Option(*flags, metavar=metavar, help=text, rich_help_panel=name, **settings)

    return option


def _completing(names: str) -> dict[str, Any]:
    """Settings: completion from ``package.module:NAMES``, which is imported when the shell asks."""
    return {"autocompletion": lambda incomplete: [name for name in _named(names) if name.startswith(incomplete)]}


def _one_of(names: str) -> dict[str, Any]:
    """Settings: the value is one of ``package.module:NAMES``, which ``--help`` does not import."""

    def parse(value: str) -> str:
        if value not in _named(names):
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(_named(names))}.")
        return value

    return {"parser": parse, **_completing(names)}


def _named(names: str) -> list[str]:
    module, _, attribute = names.partition(":")
    return list(getattr(importlib.import_module(module), attribute))


_general, _model, _inputs, _file = map(_panel, (None, "Model", "Inputs", "File"))
_onnx, _pytorch, _comparison = map(_panel, ("ONNX", "TorchScript and pt2", "Comparison"))
_certificate, _output, _shapes = map(_panel, ("Certificate", "Output", "Shapes"))
_quantization = _panel("Quantization")
_engine, _server = map(_panel, ("Engine", "Server"))


def _target(default: str) -> Any:
    return _file("--output -o FILE", f"The file to write; by default {default}.")


Model = Annotated[
    str,
    _model(
        "--model -m MODULE:FACTORY",
        "The model: package.module:factory (a function or class without required arguments, or an nn.Module), "
        "looked for in the current directory first; or a .pt2 file.",
        show_default=False,
    ),
]
Inputs = Annotated[
    list[str] | None,
    _inputs(
        "--input -i SPEC",
        "An example input, in forward's order or by name: 8,3,32,32 or 'x:float32[8,3,32,32]' (random), "
        "or data.npz, x:data.npy, x:data.npz:key (real data verifies better). An entry of a dict is named by its path, "
        "x.ids:int64[8]; x:data.npz:* is a dict of all arrays. Repeatable.",
    ),
]
Runtime = Annotated[
    str | None,
    _comparison(
        "--runtime NAME",
        "The runtime of the file; by default ONNX Runtime on the CPU, or the one of the file's format. "
        "nnorm-export doctor lists them.",
        **_completing("nnorm_export.runtimes:RUNTIMES"),
    ),
]
TrustPickle = Annotated[
    bool,
    _general("--trust-pickle", "Open a .pt2 program that runs code. Only for files from someone you trust."),
]
ExternalData = Annotated[
    bool | None,
    _file("--external-data/--no-external-data", "Keep the weights in FILE.data; by default those over 2 GiB."),
]
NoRun = Annotated[bool, _output("--no-run", "Do not open the file in its runtime.")]
NoVerify = Annotated[bool, _output("--no-verify", "Write the file without comparing it.")]


@dataclass
class OutputOptions:
    json_output: Annotated[bool, _output("--json", "Print one JSON object instead of tables.")] = False
    quiet: Annotated[bool, _output("--quiet -q", "Print errors only.")] = False
    verbose: Annotated[bool, _output("--verbose -v", "Print more; tracebacks with errors.")] = False


@dataclass
class ModelSourceOptions:
    model: Model
    model_arg: Annotated[
        list[str] | None,
        _model("--model-arg KEY=VALUE", "An argument for the factory: a Python literal or text. Repeatable."),
    ] = None
    checkpoint: Annotated[
        str | None, _model("--checkpoint -c FILE", "Trained weights: .pth, .pt, .ckpt, .safetensors.")
    ] = None
    checkpoint_key: Annotated[
        str | None,
        _model("--checkpoint-key KEY", "The weights' key in the checkpoint, if an unusual one: ema, swa.model."),
    ] = None
    checkpoint_prefix: Annotated[
        str | None,
        _model(
            "--checkpoint-prefix PREFIX",
            "What the model's keys begin with in the checkpoint: model, ema_model; '' for nothing. By default the one "
            "that fits. Other keys are left.",
        ),
    ] = None
    trust_pickle: Annotated[
        bool,
        _model(
            "--trust-pickle", "Load a checkpoint or .pt2 file that runs code. Only for files from someone you trust."
        ),
    ] = False
    passthrough: Annotated[
        list[str] | None,
        _model("--passthrough CLASS", "A class like a normalization that is plain PyTorch: keep it. Repeatable."),
    ] = None


@dataclass
class ModelOptions(ModelSourceOptions):
    input_specs: Inputs = None


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
        _inputs(
            "--dynamic SPEC",
            "Dynamic axes in place of the batch: x:0=batch,1=seq or, with a range, 'x:1=seq[2..512]'. Axes of one name "
            "have one length; all others are fixed. Repeatable.",
        ),
    ] = None
    fixed_shape: Annotated[bool, _inputs("--fixed-shape", "Fix every axis. By default the batch is dynamic.")] = False
    input_names: Annotated[str | None, _inputs("--input-names A,B", "Names of the inputs in the file.")] = None
    output_names: Annotated[str | None, _inputs("--output-names A,B", "Names of the outputs in the file.")] = None
    file: Annotated[str | None, _target("model.onnx, or model with the ending of the format")] = None
    target: Annotated[
        str | None,
        _file(
            "--target -t RUNTIME",
            "The runtime that the file is for, which gets the format, form, opset and shapes that it reads: "
            "onnxruntime (default), openvino, opencv, web (onnxruntime-web), tract, tensorrt, executorch (.pte), "
            "litert (.tflite), coreml (.mlpackage).",
            **_one_of("nnorm_export.exporting.targets:TARGETS"),
        ),
    ] = None
    file_format: Annotated[
        str | None,
        _file(
            "--format -f FORMAT",
            "onnx (default): ONNX Runtime, TensorRT and others. pt2: torch.export.load. aoti: the same compiled by "
            "AOTInductor, for Python and C++. torchscript: torch.jit.load and LibTorch; PyTorch has deprecated it.",
            **_one_of("nnorm_export.cli.export:FORMATS"),
        ),
    ] = None
    dtype: Annotated[
        str | None,
        _file(
            "--dtype TYPE",
            "fp32, fp16, bf16 or fp64; the model's own by default.",
            **_one_of("nnorm_export.names:DTYPE_NAMES"),
        ),
    ] = None
    external_data: ExternalData = None
    form: Annotated[
        str | None,
        _onnx(
            "--form FORM",
            "portable (default): nodes with bodies. primitives: standard operators only, for runtimes without "
            "functions. custom: nodes without bodies, needs a kernel or plugin.",
            **_one_of("nnorm_export.names:FORMS"),
        ),
    ] = None
    opset: Annotated[
        int | None,
        _onnx("--opset N", "ONNX opset, 18 or newer; 20, the default, runs on ONNX Runtime 1.18 (bf16: 22)."),
    ] = None
    method: Annotated[
        str | None,
        _pytorch(
            "--method METHOD",
            "trace (default): what the model does with the example. script: the model's own code with its branches.",
            **_one_of("nnorm_export.names:TORCHSCRIPT_METHODS"),
        ),
    ] = None
    no_optimize: Annotated[
        bool, _pytorch("--no-optimize", "Keep modules and parameters in TorchScript instead of folding them.")
    ] = False
    operators: Annotated[
        str | None,
        _pytorch(
            "--operators HOW",
            "decomposed (default): a .pt2 that needs PyTorch alone. kept: operators of torch.ops.nnorm.",
            **_one_of("nnorm_export.names:PT2_OPERATORS"),
        ),
    ] = None
    inductor_config: Annotated[
        list[str] | None,
        _pytorch("--inductor-config KEY=VALUE", "An option of Inductor for aoti: a literal or text. Repeatable."),
    ] = None
    strict: Annotated[
        bool, _general("--strict", "Refuse a model with norms that nnorm_export does not know, naming all of them.")
    ] = False
    no_verify: NoVerify = False


@dataclass
class VerifyOptions:
    url: Annotated[
        str | None,
        _general(
            "--url URL",
            "Instead of a file, a model on a server (KServe v2): http://HOST:8000/MODEL or grpc://HOST:8001/MODEL.",
        ),
    ] = None
    timeout: Annotated[
        float | None, _general("--timeout SECONDS", "With --url, how long a call may take in all; by default 60.")
    ] = None
    runtime: Runtime = None
    criterion: Annotated[
        str | None,
        _comparison(
            "--criterion NAME",
            "budget (default), or allclose: torch.testing's tolerances for the dtype, or --rtol and --atol.",
            **_one_of("nnorm_export.parity.criteria:CRITERIA"),
        ),
    ] = None
    rtol: Annotated[
        list[str] | None,
        _comparison(
            "--rtol [OUTPUT:]X",
            "Relative tolerance, in place of the error budget, of one output or of all. Repeatable.",
        ),
    ] = None
    atol: Annotated[
        list[str] | None, _comparison("--atol [OUTPUT:]X", "Absolute tolerance, as --rtol. Repeatable.")
    ] = None
    statistic: Annotated[
        list[str] | None,
        _comparison(
            "--statistic [OUTPUT:]NAME",
            "What decides over the elements' errors: max (default), mean, median, or a percentile: p99. Repeatable.",
        ),
    ] = None
    float16: Annotated[
        bool, _comparison("--float16", "List the normalizations that float16 puts at risk on these inputs, and why.")
    ] = False
    probes: Annotated[
        bool, _comparison("--probes", "Also run every normalization on inputs and λ that reach all its branches.")
    ] = False
    record: Annotated[
        str | None,
        _certificate("--record DIR", "If it passes, write a certificate: inputs, outputs, hashes, versions."),
    ] = None
    replay: Annotated[
        str | None,
        _certificate("--replay DIR", "Compare with a certificate; needs neither PyTorch nor the model's code."),
    ] = None
    page: Annotated[
        str | None, _output("--report FILE.html", "Write a page with the error of each layer, λ, what ran where.")
    ] = None


@dataclass
class BisectOptions:
    runtime: Runtime = None
    layer: Annotated[
        list[str] | None,
        _comparison("--layer PATH", "Another layer to compare, by its path in the model: layer1.0.conv1. Repeatable."),
    ] = None
    plot: Annotated[str | None, _output("--plot FILE", "Draw the errors of every layer: .png, .svg or .pdf.")] = None


@dataclass
class OptimizeOptions:
    input_specs: Inputs = None
    target: Annotated[str | None, _target("MODEL.cpu.onnx beside the model")] = None
    external_data: ExternalData = None
    no_verify: NoVerify = False


@dataclass
class QuantizeOptions:
    calibrate: Annotated[
        list[str],
        _inputs(
            "--calibrate SPEC",
            "Data as in service, a few hundred samples, from which the ranges of all tensors are found: data.npz, "
            "x:data.npy, x:data.npz:key. Repeatable, for several inputs.",
            show_default=False,
        ),
    ]
    test: Annotated[
        list[str] | None,
        _inputs("--test SPEC", "Other data to compare the outputs on; by default those of --calibrate. Repeatable."),
    ] = None
    batch_size: Annotated[
        int, _inputs("--batch N", "How many samples run at a time, if the batch is dynamic.", min=1)
    ] = 32
    target: Annotated[str | None, _target("MODEL.int8.onnx beside the model")] = None
    form: Annotated[
        str,
        _file(
            "--form FORM",
            "portable (default): nodes with bodies. primitives: standard operators only, without tables. custom: nodes "
            "without bodies.",
            **_one_of("nnorm_export.names:FORMS"),
        ),
    ] = "portable"
    external_data: ExternalData = None
    method: Annotated[
        str,
        _quantization(
            "--method NAME",
            "How the range of a tensor is found. minmax (default): its least and greatest value. percentile: without "
            "the rarest values. entropy: the range that loses least information.",
            **_one_of("nnorm_export.quantizing.calibration:METHODS"),
        ),
    ] = "minmax"
    percentile: Annotated[
        float, _quantization("--percentile X", "The percentage of the values that --method percentile keeps.")
    ] = 99.999
    activation: Annotated[
        str,
        _quantization(
            "--activation TYPE",
            "uint8 (default), the fastest on x86, or int8.",
            **_one_of("nnorm_export.quantizing.qdq:ACTIVATIONS"),
        ),
    ] = "uint8"
    weights: Annotated[
        str,
        _quantization(
            "--weights HOW",
            "per-channel (default): a scale for each output channel of a weight. per-tensor: one for all.",
            **_one_of("nnorm_export.quantizing.qdq:WEIGHTS"),
        ),
    ] = "per-channel"
    reduce_range: Annotated[
        bool,
        _quantization("--reduce-range", "Weights of 7 bits, for x86 processors without VNNI, where sums overflow."),
    ] = False
    keep: Annotated[
        list[str] | None,
        _quantization(
            "--keep PATH",
            "A layer that stays float, or a module with all its layers, by its path in the model: layer4.1. "
            "Repeatable.",
        ),
    ] = None
    rank: Annotated[
        bool, _comparison("--rank", "Measure what each layer costs: the decibels gained if it alone stays float.")
    ] = False
    min_agreement: Annotated[
        float | None,
        _comparison("--min-agreement X", "The least share of rows with the same greatest entry: 0.99.", min=0, max=1),
    ] = None
    min_sqnr: Annotated[
        float,
        _comparison(
            "--min-sqnr DB",
            "The least signal-to-noise ratio of each output in decibels; 0, the default, is an error as great as the "
            "output.",
        ),
    ] = 0.0


@dataclass
class ConvertOptions:
    form: Annotated[
        str,
        _onnx(
            "--form FORM",
            "primitives (default): standard operators only. portable: nodes with bodies. custom: nodes without bodies.",
            **_one_of("nnorm_export.names:FORMS"),
        ),
    ] = "primitives"
    input_specs: Inputs = None
    target: Annotated[str | None, _target("MODEL.FORM.onnx beside the model")] = None
    external_data: ExternalData = None
    no_verify: NoVerify = False


@dataclass
class EngineOptions:
    least: Annotated[
        list[str] | None, _shapes("--min NAME:SHAPE", "The least shape of an input: x:1,3,32,32. Repeatable.")
    ] = None
    best: Annotated[list[str] | None, _shapes("--opt NAME:SHAPE", "Its most frequent shape. Repeatable.")] = None
    greatest: Annotated[list[str] | None, _shapes("--max NAME:SHAPE", "Its greatest shape. Repeatable.")] = None
    target: Annotated[str | None, _target("MODEL.plan, or MODEL.rtx.plan, beside the model")] = None
    rtx: Annotated[bool, _engine("--rtx", "Build for TensorRT-RTX and RTX cards; the build needs no GPU.")] = False
    compute_capability: Annotated[
        str | None,
        _engine(
            "--compute-capability LIST",
            "With --rtx, the cards it is for: 8.6,8.9,12.0; by default 8.0 and later, or current: this machine's.",
        ),
    ] = None
    plugins: Annotated[
        bool | None,
        _engine(
            "--plugins/--no-plugins",
            "Run all normalizations by plugins, or none; by default the better for each operator.",
        ),
    ] = None
    tf32: Annotated[bool, _engine("--tf32", "Round the factors of float32 products to TF32, for speed.")] = False
    timing_cache: Annotated[
        str | None, _engine("--timing-cache FILE", "Keep TensorRT's measurements for the next build.")
    ] = None


@dataclass
class ServerOptions:
    """The fields have the names of the parameters of ``write_repository``."""

    repository: Annotated[str, _general("--output -o FOLDER", "The model repository; created if missing.")]
    name: Annotated[str | None, _general("--name NAME", "The model's name there; by default the file's.")] = None
    version: Annotated[int | None, _general("--version N", "The version to write; by default the next.", min=1)] = None
    backend: Annotated[
        str | None,
        _server(
            "--backend NAME",
            "onnxruntime (default), tensorrt (default for engines), or python: nnorm_export in the server.",
            **_one_of("nnorm_export.serving.repository:BACKENDS"),
        ),
    ] = None
    library_path: Annotated[
        str | None,
        _server(
            "--library PATH",
            "Absolute path of the library of kernels on the server; by default its path here. none serves the bodies.",
        ),
    ] = None
    device: Annotated[str, _server("--device cpu|gpu", "What runs the model.")] = "cpu"
    instances: Annotated[int, _server("--instances N", "Instances of the model on each device.", min=1)] = 1
    threads: Annotated[int, _server("--threads N", "Threads of an instance; 0 for all.", min=0)] = 0
    max_batch_size: Annotated[int, _server("--max-batch N", "The greatest batch; 0 for no batching.", min=0)] = 32
    max_queue_delay_microseconds: Annotated[
        int, _server("--max-delay MICROSECONDS", "How long a request waits for others.", min=0)
    ] = 1000
