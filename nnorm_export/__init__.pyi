# The public names, and the module that each comes from: `__init__.py` reads this file and imports a name when it is
# first used. torch takes seconds to import, and `nnorm-export --help` does not need it.
from . import layers as layers
from . import testing as testing
from ._version import __version__ as __version__
from .errors import (
    CheckpointError as CheckpointError,
)
from .errors import (
    ExportError as ExportError,
)
from .errors import (
    FreezeError as FreezeError,
)
from .errors import (
    InputError as InputError,
)
from .errors import (
    ModelFileError as ModelFileError,
)
from .errors import (
    NnormExportError as NnormExportError,
)
from .errors import (
    ParityError as ParityError,
)
from .errors import (
    RuntimeMissingError as RuntimeMissingError,
)
from .exporting.change_form import FormReport as FormReport
from .exporting.change_form import change_form as change_form
from .exporting.onnx import export as export
from .exporting.programs import export_aoti as export_aoti
from .exporting.programs import export_program as export_program
from .exporting.report import ExportReport as ExportReport
from .exporting.torchscript import export_torchscript as export_torchscript
from .freezing import freeze as freeze
from .library import (
    get_library_path as get_library_path,
)
from .library import (
    get_plugin_path as get_plugin_path,
)
from .library import (
    register as register,
)
from .optimizing.cached import load_optimized as load_optimized
from .optimizing.optimize import OptimizeReport as OptimizeReport
from .optimizing.optimize import optimize as optimize
from .parity.bisection import Bisection as Bisection
from .parity.bisection import bisect as bisect
from .parity.certificates import replay as replay
from .parity.comparison import verify as verify
from .parity.exact import BitsReport as BitsReport
from .parity.exact import compare_bits as compare_bits
from .parity.half_safety import HalfRisk as HalfRisk
from .parity.half_safety import float16_risks as float16_risks
from .parity.outcome import ParityReport as ParityReport
from .parity.probing import ProbeReport as ProbeReport
from .parity.probing import probe as probe
from .parity.report.page import write_report as write_report
from .quantizing.quantize import quantize as quantize
from .quantizing.report import QuantizeReport as QuantizeReport
from .runtimes import Runner as Runner
from .runtimes import load as load
from .runtimes._diagnosis import Diagnosis as Diagnosis
from .runtimes._diagnosis import diagnose as diagnose
from .serving.repository import Repository as Repository
from .serving.repository import write_repository as write_repository
from .tensorrt.engine import EngineReport as EngineReport
from .tensorrt.engine import build_engine as build_engine
