"""The options of the commands that make another file of an exported one; see :mod:`nnorm_export.cli.options`."""

from dataclasses import dataclass
from typing import Annotated

from nnorm_export.cli import panels
from nnorm_export.cli.options import (
    ExternalData,
    Inputs,
    KeepIoTypes,
    NoVerify,
    output_option,
)
from nnorm_export.names import OTHER_BACKENDS


@dataclass
class OptimizeOptions:
    input_specs: Inputs = None
    output: Annotated[str | None, output_option("MODEL.cpu.onnx beside the model")] = None
    external_data: ExternalData = None
    no_verify: NoVerify = False


@dataclass
class QuantizeOptions:
    calibrate: Annotated[
        list[str],
        panels.inputs(
            "--calibrate SPEC",
            "Data as in service, a few hundred samples, from which the ranges of all tensors are found: data.npz, "
            "x:data.npy, x:data.npz:key. Repeatable, for several inputs.",
            show_default=False,
        ),
    ]
    test: Annotated[
        list[str] | None,
        panels.inputs(
            "--test SPEC", "Other data to compare the outputs on; by default those of --calibrate. Repeatable."
        ),
    ] = None
    batch_size: Annotated[
        int, panels.inputs("--batch N", "How many samples run at a time, if the batch is dynamic.", min=1)
    ] = 32
    output: Annotated[str | None, output_option("MODEL.int8.onnx beside the model")] = None
    target: Annotated[
        str,
        panels.file(
            "--target -t RUNTIME",
            "The runtime that the file is for: onnxruntime (default), tensorrt or openvino. The last two compute norms "
            "in float, and get 8 bits in front of products alone.",
            **panels.one_of("nnorm_export.quantizing.schemes:SCHEMES"),
        ),
    ] = "onnxruntime"
    form: Annotated[
        str | None,
        panels.file(
            "--form FORM",
            "portable (default, but for openvino): nodes with bodies. primitives: standard operators only, without "
            "tables. custom: nodes without bodies.",
            **panels.one_of("nnorm_export.names:FORMS"),
        ),
    ] = None
    external_data: ExternalData = None
    keep_io_types: Annotated[
        bool,
        panels.file("--keep-io-types", "float32 inputs and outputs: every int8 file has them, so it changes nothing."),
    ] = False
    method: Annotated[
        str,
        panels.quantization(
            "--method NAME",
            "How the range of a tensor is found. minmax (default): its least and greatest value. percentile: without "
            "the rarest values. entropy: the range that loses least information. dynamic: in each call, for products "
            "of matrices alone.",
            **panels.one_of("nnorm_export.quantizing.calibration:METHODS"),
        ),
    ] = "minmax"
    percentile: Annotated[
        float, panels.quantization("--percentile X", "The percentage of the values that --method percentile keeps.")
    ] = 99.999
    activation: Annotated[
        str | None,
        panels.quantization(
            "--activation TYPE",
            "uint8, the default for onnxruntime and the fastest on x86, or int8.",
            **panels.one_of("nnorm_export.quantizing.schemes:ACTIVATIONS"),
        ),
    ] = None
    weights: Annotated[
        str,
        panels.quantization(
            "--weights HOW",
            "per-channel (default): a scale for each output channel of a weight. per-tensor: one for all.",
            **panels.one_of("nnorm_export.quantizing.qdq:WEIGHTS"),
        ),
    ] = "per-channel"
    reduce_range: Annotated[
        bool | None,
        panels.quantization(
            "--reduce-range/--no-reduce-range",
            "Weights of 7 bits, or of 8; by default 7 for onnxruntime and openvino, whose sums overflow with 8 on x86 "
            "processors without VNNI.",
        ),
    ] = None
    keep: Annotated[
        list[str] | None,
        panels.quantization(
            "--keep PATH",
            "A layer that stays float, or a module with all its layers, by its path in the model: layer4.1. "
            "Repeatable.",
        ),
    ] = None
    rank: Annotated[
        bool, panels.comparison("--rank", "Measure what each layer costs: the decibels gained if it alone stays float.")
    ] = False
    by_layer: Annotated[
        bool,
        panels.comparison(
            "--by-layer", "Measure the signal-to-noise ratio behind each layer, on the first batch of the test data."
        ),
    ] = False
    min_agreement: Annotated[
        float | None,
        panels.comparison(
            "--min-agreement X", "The least share of rows with the same greatest entry; by default any.", min=0, max=1
        ),
    ] = None
    min_sqnr: Annotated[
        float,
        panels.comparison(
            "--min-sqnr DB",
            "The least signal-to-noise ratio of each output in decibels; 0, the default, is an error as great as the "
            "output.",
        ),
    ] = 0.0


@dataclass
class ConvertOptions:
    form: Annotated[
        str | None,
        panels.onnx(
            "--form FORM",
            "primitives: standard operators only; the default, except with --opset and --keep-io-types, which keep the "
            "form. portable: nodes with bodies. custom: nodes without bodies.",
            **panels.one_of("nnorm_export.names:FORMS"),
        ),
    ] = None
    opset: Annotated[
        int | None,
        panels.onnx(
            "--opset N", "An older ONNX opset, 11 or newer, for older runtimes: 15 for ONNX Runtime 1.10, say.", min=11
        ),
    ] = None
    keep_io_types: KeepIoTypes = False
    input_specs: Inputs = None
    output: Annotated[
        str | None, output_option("MODEL.FORM.onnx, MODEL.opsetN.onnx or MODEL.float32-io.onnx, beside the model")
    ] = None
    external_data: ExternalData = None
    no_verify: NoVerify = False


@dataclass
class EngineOptions:
    least: Annotated[
        list[str] | None, panels.shapes("--min NAME:SHAPE", "The least shape of an input: x:1,3,32,32. Repeatable.")
    ] = None
    best: Annotated[list[str] | None, panels.shapes("--opt NAME:SHAPE", "Its most frequent shape. Repeatable.")] = None
    greatest: Annotated[list[str] | None, panels.shapes("--max NAME:SHAPE", "Its greatest shape. Repeatable.")] = None
    output: Annotated[str | None, output_option("MODEL.plan, or MODEL.rtx.plan, beside the model")] = None
    rtx: Annotated[bool, panels.engine("--rtx", "Build for TensorRT-RTX and RTX cards; the build needs no GPU.")] = (
        False
    )
    compute_capability: Annotated[
        str | None,
        panels.engine(
            "--compute-capability LIST",
            "With --rtx, the cards it is for: 8.6,8.9,12.0; by default 8.0 and later, or current: this machine's.",
        ),
    ] = None
    plugins: Annotated[
        bool | None,
        panels.engine(
            "--plugins/--no-plugins",
            "Run all normalizations by plugins, or none; by default the better for each operator.",
        ),
    ] = None
    tf32: Annotated[bool, panels.engine("--tf32", "Round the factors of float32 products to TF32, for speed.")] = False
    timing_cache: Annotated[
        str | None, panels.engine("--timing-cache FILE", "Keep TensorRT's measurements for the next build.")
    ] = None


@dataclass
class ServerOptions:
    """The fields have the names of the parameters of ``write_repository``."""

    output: Annotated[str, panels.general("--output -o FOLDER", "The model repository; created if missing.")]
    name: Annotated[str | None, panels.general("--name NAME", "The model's name there; by default the file's.")] = None
    version: Annotated[
        int | None, panels.general("--version N", "The version to write; by default the next.", min=1)
    ] = None
    backend: Annotated[
        str | None,
        panels.server(
            "--backend NAME",
            "onnxruntime (default), tensorrt (default for engines), or python: nnorm_export in the server.",
            **panels.one_of("nnorm_export.serving.arguments:BACKENDS", OTHER_BACKENDS),
        ),
    ] = None
    library_path: Annotated[
        str | None,
        panels.server(
            "--library PATH",
            "Absolute path of the library of kernels on the server; by default its path here. none serves the bodies.",
        ),
    ] = None
    device: Annotated[str, panels.server("--device cpu|gpu", "What runs the model.")] = "cpu"
    instances: Annotated[
        int | None, panels.server("--instances N", "Instances of the model on each device; by default 1.", min=1)
    ] = None
    threads: Annotated[
        int | None, panels.server("--threads N", "Threads of an instance; 0, the default, for all.", min=0)
    ] = None
    max_batch_size: Annotated[
        int | None,
        panels.server(
            "--max-batch N",
            "The greatest batch; 0 for no batching. By default 32, or none where it cannot be checked that rows are "
            "independent.",
            min=0,
        ),
    ] = None
    max_queue_delay_microseconds: Annotated[
        int | None,
        panels.server(
            "--max-delay MICROSECONDS", "How long a request waits for others if none is running; by default 0.", min=0
        ),
    ] = None


@dataclass
class CardOptions:
    repository: Annotated[
        str, panels.hub("--repository OWNER/NAME", "Where the folder will be on the Hub, for the lines that load it.")
    ]
    output: Annotated[str, panels.hub("--output -o FOLDER", "The folder to write; an older card's folder is replaced.")]
    certificate: Annotated[
        str | None, panels.hub("--certificate DIR", "The certificate of the file, which verify --record wrote.")
    ] = None
    tuned: Annotated[
        str | None, panels.hub("--tuned FILE", "The settings that tune wrote for the file: model.tuned.json.")
    ] = None
    introduction: Annotated[
        str | None, panels.hub("--introduction FILE.md", "Markdown for the beginning of the card.")
    ] = None
    license_id: Annotated[
        str, panels.hub("--license ID", "mit, apache-2.0, …; by default the text license in the file's metadata.")
    ] = ""
    pipeline_tag: Annotated[str, panels.hub("--pipeline-tag TASK", "image-classification, …")] = ""
    base_model: Annotated[
        list[str] | None, panels.hub("--base-model OWNER/NAME", "A model that this was made of. Repeatable.")
    ] = None
    datasets: Annotated[
        list[str] | None, panels.hub("--dataset OWNER/NAME", "A data set that it was trained on. Repeatable.")
    ] = None
    evaluated_on: Annotated[
        str, panels.hub("--evaluated-on OWNER/NAME", "The data set that the metric in the certificate is of.")
    ] = ""
    no_certificate_copy: Annotated[
        bool, panels.hub("--no-certificate-copy", "Leave out the certificate, which has the inputs of the comparison.")
    ] = False
    no_plot: Annotated[bool, panels.hub("--no-plot", "Do not draw λ, which takes nnorm_export[plot].")] = False


@dataclass
class TuneOptions:
    input_specs: Inputs = None
    output: Annotated[str | None, output_option("MODEL.tuned.json beside the model, and MODEL.tuned.onnx")] = None
    objective: Annotated[
        str,
        panels.tuning(
            "--for OBJECTIVE",
            "latency (default): the time of a call. throughput: rows in a second, in calls of several sizes.",
            **panels.one_of("nnorm_export.tuning.report:OBJECTIVES"),
        ),
    ] = "latency"
    batches: Annotated[
        list[int] | None,
        panels.tuning(
            "--batch N", "The rows of a call; by default 1, and 1 to 32 for the throughput. Repeatable for that.", min=1
        ),
    ] = None
    threads: Annotated[
        list[int] | None,
        panels.tuning(
            "--threads N", "A number of threads to try; by default 1, 2, 4, … and all cores. Repeatable.", min=1
        ),
    ] = None
    only: Annotated[
        list[str] | None,
        panels.tuning(
            "--only FILE",
            "A file to try beside the given one: optimized, int8, aoti and others; by default all. Repeatable.",
            **panels.completing("nnorm_export.tuning.variants:NAMES"),
        ),
    ] = None
    minutes: Annotated[float, panels.tuning("--minutes X", "The time limit.")] = 5.0
    qps: Annotated[
        float | None,
        panels.tuning(
            "--qps X",
            "With --p99: the requests of one row in a second that a service is to answer. Finds the fewest instances "
            "and threads for it, under that load.",
        ),
    ] = None
    p99: Annotated[
        str | None, panels.tuning("--p99 TIME", "The time in which 99 % of the requests are answered: 20ms.")
    ] = None
    replay: Annotated[
        str | None,
        panels.tuning("--replay FILE.tuned.json", "Measure again what these settings list; nothing is written."),
    ] = None
    page: Annotated[
        str | None, panels.output("--report FILE.html", "Write a page with a picture of time against accuracy.")
    ] = None
