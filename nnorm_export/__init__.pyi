# The public names, and the module that each comes from: `__init__.py` reads this file and imports a name when it is
# first used. torch takes seconds to import, and `nnorm-export --help` does not need it.
from . import layers as layers, testing as testing
from ._version import __version__ as __version__
from .converting.change_form import FormReport as FormReport, change_form as change_form
from .errors import (
    CheckpointError as CheckpointError,
    ExportError as ExportError,
    FreezeError as FreezeError,
    InputError as InputError,
    ModelFileError as ModelFileError,
    NnormExportError as NnormExportError,
    ParityError as ParityError,
    RuntimeMissingError as RuntimeMissingError,
)
from .exporting.export import (
    export as export,
    export_aoti as export_aoti,
    export_program as export_program,
    export_torchscript as export_torchscript,
)
from .exporting.report import ExportReport as ExportReport
from .files.published import download as download
from .files.required_operators import RequiredOperators as RequiredOperators
from .freezing import freeze as freeze
from .library import (
    get_library_path as get_library_path,
    get_plugin_path as get_plugin_path,
    register as register,
)
from .metrics.gate import Gate as Gate, MetricReport as MetricReport
from .models.checkpoints import load_checkpoint as load_checkpoint
from .models.decoders import (
    decoder_arguments as decoder_arguments,
    encoder_decoder_arguments as encoder_decoder_arguments,
)
from .optimizing.optimize import OptimizeReport as OptimizeReport, optimize as optimize
from .parity.certificates.bom import write_bom as write_bom
from .parity.certificates.compare_bits import BitsReport as BitsReport, compare_bits as compare_bits
from .parity.certificates.replay import replay as replay
from .parity.layer_by_layer.bisect import bisect as bisect
from .parity.layer_by_layer.bisection import Bisection as Bisection
from .parity.layer_by_layer.float16_risks import HalfRisk as HalfRisk, float16_risks as float16_risks
from .parity.layer_by_layer.probe import ProbeReport as ProbeReport, probe as probe
from .parity.report.write_report import write_report as write_report
from .parity.verdict.outcome import ParityReport as ParityReport
from .parity.verify import verify as verify
from .publishing.write_card import Card as Card, write_card as write_card
from .quantizing.quantize import quantize as quantize
from .quantizing.report import QuantizeReport as QuantizeReport
from .runtimes import Runner as Runner, load as load
from .runtimes.diagnose import Diagnosis as Diagnosis, diagnose as diagnose
from .runtimes.onnxruntime.required_operators import required_operators as required_operators
from .serving.genai import write_genai_config as write_genai_config
from .serving.log_to_mlflow import log_to_mlflow as log_to_mlflow
from .serving.manifests.request import Manifests as Manifests
from .serving.repository import Repository as Repository, write_repository as write_repository
from .tensorrt.engine import EngineReport as EngineReport, build_engine as build_engine
from .tuning.report import TuneReport as TuneReport
from .tuning.tune import tune as tune
