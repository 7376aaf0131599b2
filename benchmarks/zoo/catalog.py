"""The architectures of the zoo, each with its construction (random weights) and its inputs.

timm: the smallest model of every module that has one below 100 million parameters. torchvision, segmentation and
transformers: the families that people use, at small sizes. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.decoders import END, FAMILIES, WITH_ENCODER

_TIMM = """
test_vit test_nfnet test_mambaout test_byobnet test_resnet starnet_s050 test_vit_relpos dla46x_c mobilevit_xxs
edgenext_xx_small mobilenetv3_small_050 ese_vovnet19b_slim_dw mnasnet_small repghostnet_050 efficientvit_m0
ghostnet_050 regnetx_002 cspnext_tiny xcit_nano_12_p8_224 cs3darknet_focus_s efficientvit_b0 swiftformer_xs
efficientformerv2_s0 pvt_v2_b0 convnext_atto_rms fastvit_t8 lcnetv2_small inception_next_atto rexnet_100
hardcorenas_b coat_tiny eva02_tiny_patch14_224 convit_tiny deit_tiny_patch16_224 gmlp_ti16_224 hgnetv2_b0
shvit_s1 vit_tiny_r_s16_p8_224 cpubone_nano iformer_s efficientvim_m1 crossvit_tiny_240 repvit_m1_0
maxvit_pico_rw_256 levit_128s dpn48b visformer_tiny eca_botnext26ts_256 pit_xs_224 csatv2 resnetv2_18
legacy_seresnet18 cait_xxs24_224 skresnet18 gcvit_xxtiny tiny_vit_5m_224 efficientformer_l1 hrnet_w18_small
lowformer_b0 nest_tiny resnest26d convmixer_768_32 vitamin_small_224 legacy_xception tnt_s_legacy_patch16_224
inception_v3 rdnet_tiny twins_svt_small mvitv2_tiny res2net50_26w_4s caformer_s18 volo_d1_224 sam2_hiera_tiny
xception41p sequencer2d_s hiera_tiny_224 swin_tiny_patch4_window7_224 swinv2_cr_tiny_224
swinv2_tiny_window8_256 davit_tiny focalnet_tiny_srf selecsls42 fasternet_s tresnet_m nextvit_small
inception_v4 inception_resnet_v2 densenet264d mobilenetv5_base pnasnet5large samvit_base_patch16_224
naflexvit_base_patch16_parfac_gap beit_base_patch16_224 qwen3_vit_88m nasnetalarge
"""
_TIMM += " test_efficientnet convnext_atto"
_TORCHVISION = (
    "alexnet squeezenet1_1 vgg11_bn resnet18 resnext50_32x4d densenet121 DenseNet googlenet inception_v3 mobilenet_v2 "
    "mobilenet_v3_small mnasnet0_5 shufflenet_v2_x0_5 efficientnet_b0 regnet_y_400mf convnext_tiny vit_b_32 swin_t "
    "swin_v2_t maxvit_t segmentation.fcn_resnet50 segmentation.deeplabv3_mobilenet_v3_large "
    "segmentation.lraspp_mobilenet_v3_large video.r3d_18 video.s3d"
)
_REQUIRED_SIZES = {"inception_v3": 299, "maxvit_t": 224, "s3d": 224}
_DEFAULT_SIZE = 64  # of networks that take images of any size


@dataclass(frozen=True)
class Architecture:
    """A network with random weights: ``build`` makes it, and ``inputs`` its example, as arguments by name.

    One that ``decodes`` generates tokens by its file. RMS norms are converted if ``rms_norms``.
    """

    source: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], dict[str, Tensor]]
    decodes: bool = False
    rms_norms: bool = False


TWELVE = (
    "timm/test_vit", "timm/test_efficientnet", "timm/convnext_atto", "timm/regnetx_002", "timm/test_mambaout",
    "torchvision/resnet18", "torchvision/DenseNet", "torchvision/segmentation.lraspp_mobilenet_v3_large",
    "transformers/bert", "transformers/gpt2", "transformers/wav2vec2", "transformers/detr",
)  # fmt: skip
"""Small architectures of different kinds, for `make test-zoo`."""


def catalog() -> dict[str, Architecture]:
    """``source/name`` -> the architecture, for the libraries that are installed."""
    entries = [*(_timm(name) for name in _TIMM.split()), *(_torchvision(name) for name in _TORCHVISION.split())]
    entries += [_transformers(name, *parts) for name, parts in _TRANSFORMERS.items()]
    entries += [_decoder(name) for name in FAMILIES]
    return {f"{entry.source}/{entry.name}": entry for entry in entries}


def without_operators_of_torchvision() -> None:
    """Defines operators of torchvision without code: torchvision's own do not load beside a CPU build of torch.

    Its Python models need only the names.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)  # torch removes the definitions when the library is deleted


_LIBRARIES: list[torch.library.Library] = []


def _timm(name: str) -> Architecture:
    def build() -> nn.Module:
        without_operators_of_torchvision()
        timm = importlib.import_module("timm")  # the import fails before these operators are defined
        return timm.create_model(name)

    def inputs(model: nn.Module) -> dict[str, Tensor]:
        settings: Any = model.default_cfg
        shape = settings["input_size"]
        size = shape[-1] if settings.get("fixed_input_size") else max(_DEFAULT_SIZE, min(shape[-1], 128))
        return {"x": torch.randn(2, shape[0], size, size)}

    return Architecture("timm", name, build, inputs)


def _torchvision(name: str) -> Architecture:
    family, _, short = name.rpartition(".")

    def build() -> nn.Module:
        without_operators_of_torchvision()
        torchvision = importlib.import_module("torchvision")  # as for timm
        module = getattr(torchvision.models, family) if family else torchvision.models
        options: dict[str, Any] = {"weights": None}
        if short in ("googlenet", "inception_v3"):
            options |= {"init_weights": False, "aux_logits": False}
        if family == "segmentation":
            options["weights_backbone"] = None
        if short == "DenseNet":  # the class, because every named variant is larger
            options = {"growth_rate": 16, "block_config": (2, 2, 2, 2), "num_init_features": 32}
        model: nn.Module = getattr(module, short)(**options)
        return model

    def inputs(model: nn.Module) -> dict[str, Tensor]:
        name = next(iter(inspect.signature(model.forward).parameters))
        frames = (16,) if family == "video" else ()
        size = _REQUIRED_SIZES.get(short, 224 if "vit" in short else _DEFAULT_SIZE)
        return {name: torch.randn(2, 3, *frames, size, size)}

    return Architecture("torchvision", name, build, inputs)


# name -> (class, settings, inputs). The model returns the logits or the last hidden states.
_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_TOKENS = {"input_ids": (2, 16)}
_PIXELS = {"pixel_values": (2, 3, 64, 64)}
_TRANSFORMERS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "bert": ("BertModel", {**_SMALL, "vocab_size": 100}, _TOKENS),
    "roberta": ("RobertaModel", {**_SMALL, "vocab_size": 100}, _TOKENS),
    "distilbert": ("DistilBertModel", {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}, _TOKENS),
    "electra": ("ElectraModel", {**_SMALL, "vocab_size": 100}, _TOKENS),
    "gpt2": ("GPT2Model", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "use_cache": False}, _TOKENS),
    "opt": (
        "OPTModel",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128, "vocab_size": 100,
         "word_embed_proj_dim": 64, "use_cache": False},
        _TOKENS,
    ),
    "vit": ("ViTModel", {**_SMALL, "image_size": 64, "patch_size": 16}, _PIXELS),
    "deit": ("DeiTModel", {**_SMALL, "image_size": 64, "patch_size": 16}, _PIXELS),
    "beit": ("BeitModel", {**_SMALL, "image_size": 64, "patch_size": 16}, _PIXELS),
    "convnext": ("ConvNextModel", {"hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 2, 1]}, _PIXELS),
    "segformer": (
        "SegformerModel",
        {"hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4]},
        _PIXELS,
    ),
    "detr": (
        "DetrModel",
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10,
         "backbone_config": {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 48, 64],
                             "depths": [1, 1, 1, 1], "out_features": ["stage4"]}},
        _PIXELS,
    ),
    "yolos": ("YolosModel", {**_SMALL, "image_size": [64, 64], "patch_size": 16, "num_detection_tokens": 10}, _PIXELS),
    "whisper": (
        "WhisperModel",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 100,
         "max_source_positions": 50, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 1, "num_mel_bins": 20, "use_cache": False},
        {"input_features": (2, 20, 100), "decoder_input_ids": (2, 8)},
    ),
    "audio-spectrogram-transformer": (
        "ASTModel", {**_SMALL, "max_length": 64, "num_mel_bins": 32}, {"input_values": (2, 64, 32)}
    ),
    "hubert": (
        "HubertModel",
        {**_SMALL, "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
        {"input_values": (2, 4000)},
    ),
    "wav2vec2": (
        "Wav2Vec2Model",
        {**_SMALL, "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
        {"input_values": (2, 4000)},
    ),
    "patchtst": (
        "PatchTSTModel",
        {"num_input_channels": 3, "context_length": 64, "patch_length": 8, "patch_stride": 8, "d_model": 64,
         "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128},
        {"past_values": (2, 64, 3)},
    ),
}  # fmt: skip


def _transformers(name: str, cls: str, settings: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Architecture:
    def build() -> nn.Module:
        without_operators_of_torchvision()
        transformers = importlib.import_module("transformers")  # as for timm
        model_class: Any = getattr(transformers, cls)
        model: nn.Module = model_class(model_class.config_class(**settings))
        return model

    def inputs(_: nn.Module) -> dict[str, Tensor]:
        return _random(shapes)

    return Architecture("transformers", name, build, inputs, rms_norms=True)


def padding_mask(shape: tuple[int, ...]) -> Tensor:
    """Half of the last row is padding, on the left."""
    mask = torch.ones(shape, dtype=torch.int64)
    mask[-1, : shape[1] // 2] = 0
    return mask


def _random(shapes: Mapping[str, tuple[int, ...]], first: int = 1) -> dict[str, Tensor]:
    """Tokens from ``first`` on, a mask, and numbers."""

    def of(name: str, shape: tuple[int, ...]) -> Tensor:
        if name == "attention_mask":
            return padding_mask(shape)
        return torch.randint(first, 90, shape) if name.endswith("input_ids") else torch.randn(shape)

    return {name: of(name, shape) for name, shape in shapes.items()}


def build_decoder(name: str, **changed: Any) -> nn.Module:
    """A decoder of the family ``name``, with random weights; ``changed`` are settings of its config."""
    without_operators_of_torchvision()
    transformers = importlib.import_module("transformers")  # as for timm
    config, settings = FAMILIES[name]
    kind, _ = WITH_ENCODER.get(name, ("AutoModelForCausalLM", {}))
    model: nn.Module = getattr(transformers, kind).from_config(getattr(transformers, config)(**settings | changed))
    return model


def _decoder(name: str) -> Architecture:
    def inputs(_: nn.Module) -> dict[str, Tensor]:
        if name in WITH_ENCODER:
            return _random({**WITH_ENCODER[name][1], "decoder_input_ids": (2, 3)}, END + 1)
        return _random({"input_ids": (2, 6)}, END + 1)

    has_cache = FAMILIES[name][1].get("use_cache", True)
    return Architecture("decoders", name, partial(build_decoder, name), inputs, decodes=has_cache, rms_norms=True)
