"""Decoders of transformers: their caches, generated tokens, and the command line and onnxruntime-genai on their files.

`make test-zoo` runs these tests in the environment that has the libraries.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from command_line import fails, run
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from torch import Tensor, nn

from benchmarks.zoo.catalog import build_decoder, catalog, without_operators_of_torchvision
from benchmarks.zoo.decoders import END, generate, step_of
from nnorm_export import (
    ExportError,
    InputError,
    change_form,
    decoder_arguments,
    encoder_decoder_arguments,
    export,
    load,
    write_genai_config,
)
from nnorm_export.layers import convert_normal_norm

if any(importlib.util.find_spec(name) is None for name in ("transformers", "onnxruntime_genai")):
    pytest.skip("make test-zoo installs transformers and onnxruntime-genai", allow_module_level=True)
without_operators_of_torchvision()
transformers, genai = map(importlib.import_module, ("transformers", "onnxruntime_genai"))

SAMPLES = Path(__file__).parents[2] / "samples"


pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.randint(1, 90, (2, 6), generator=torch.Generator().manual_seed(0))
CACHE = [f"past_key_values_{part}_cache_{layer}" for part in ("key", "value") for layer in (0, 1)]


@pytest.fixture(scope="module")
def decoder() -> nn.Module:
    torch.manual_seed(0)
    return convert_normal_norm(transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL))).eval()


@pytest.mark.slow
def test_the_cache_of_a_decoder_goes_in_and_out_as_tensors(decoder: nn.Module, tmp_path: Path) -> None:
    """Token by token, the two files compute what the model does with all tokens at once."""
    export(decoder, (), tmp_path / "first.onnx", kwargs={"input_ids": IDS})
    past = decoder(input_ids=IDS).past_key_values
    batch, length = torch.export.Dim("batch"), torch.export.Dim("past", min=2)
    layers = [{0: batch, 2: length}] * 2
    shapes = {"input_ids": {0: batch}, "past_key_values": [layers, layers]}
    example = {"input_ids": IDS[:, :1], "past_key_values": past}
    export(decoder, (), tmp_path / "next.onnx", kwargs=example, dynamic_shapes=shapes)
    assert past.get_seq_length() == 6, "the example is what it was"
    first, following = load(tmp_path / "first.onnx"), load(tmp_path / "next.onnx")
    assert [info.name for info in following.inputs] == ["input_ids", *CACHE]
    assert [info.name for info in following.outputs] == ["logits", *(f"{name}_out" for name in CACHE)]
    logits, *cache = first(IDS.numpy())
    seen = IDS.numpy()
    for token in (7, 8):
        seen = np.concatenate([seen, np.full((2, 1), token)], axis=1)
        logits, *cache = following(seen[:, -1:], *cache)
        expected = decoder(input_ids=torch.from_numpy(seen), use_cache=False).logits[:, -1:]
        np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whisper", pytest.param("t5", marks=pytest.mark.long)])
def test_an_encoder_and_its_decoder_are_two_files(name: str, tmp_path: Path) -> None:
    """One with the first tokens, and one for each token after them; the logits are those of all tokens at once."""
    torch.manual_seed(0)
    model = convert_normal_norm(build_decoder(name), rms_norms=True).eval()
    *of_encoder, tokens = catalog()[f"decoders/{name}"].inputs(model).items()
    if name == "whisper":  # a mask of all frames, of which the encoder keeps every other one
        of_encoder.append(("attention_mask", torch.ones(2, 100, dtype=torch.int64)))
    both = encoder_decoder_arguments(model, dict(of_encoder))
    paths = tmp_path / "first.onnx", tmp_path / "step.onnx"
    for path, arguments in zip(paths, both, strict=True):
        assert export(model, f=path, **arguments).parity
    first, step = map(load, paths)
    assert {*first.implementations.values(), *step.implementations.values()} == {"kernel"}
    axes = {info.name: info.shape for info in step.outputs}
    assert axes["present.1.decoder.value"][2] == "past + sequence"
    assert axes["present.1.encoder.value"][2] == (50 if name == "whisper" else "encoder_sequence")
    given = {key: tensor[:1] for key, tensor in (*of_encoder, tokens)}
    found = torch.from_numpy(generate(first, step, {key: tensor.numpy() for key, tensor in given.items()}, 12))
    given["decoder_input_ids"] = torch.cat([given["decoder_input_ids"], found], 1)
    logits = model(**given).logits[:, -13:-1]
    logits[..., END] = -torch.inf
    np.testing.assert_array_equal(found, logits.argmax(-1))
    with pytest.raises(InputError, match=r"has an encoder too; call nnorm_export\.encoder_decoder_arguments"):
        decoder_arguments(model)


def test_other_caches_are_refused_with_the_way_round(decoder: nn.Module, tmp_path: Path) -> None:
    past = transformers.StaticCache(config=decoder.config, max_cache_len=8)
    with pytest.raises(ExportError, match=r"does not see the tensors in a StaticCache.*use_cache.*DynamicCache"):
        export(decoder, (), tmp_path / "m.onnx", kwargs={"input_ids": IDS, "past_key_values": past})


USERS_DECODER = """
import torch
from benchmarks.zoo.catalog import build_decoder
from nnorm_export.layers import convert_normal_norm

def build(seed=0):
    torch.manual_seed(seed)
    return convert_normal_norm(build_decoder("gpt2")).eval()
"""
OF_USER = ("-m", "users_decoder:build", "--decoder")


@pytest.fixture(scope="module")
def users_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("decoder")
    (folder / "users_decoder.py").write_text(USERS_DECODER)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def written_decoder(users_folder: Path) -> tuple[Any, Path]:
    path = users_folder / "decoder.onnx"
    found = json.loads(run("export", *OF_USER, "-o", path, "--genai", "bodies", "--json").stdout)
    assert found["parity"]["passed"]
    assert Path(found["genai_config"]) == users_folder / "genai_config.json"
    return importlib.import_module("users_decoder").build(), path


@pytest.mark.slow
def test_the_command_line_compares_a_decoder(written_decoder: tuple[Any, Path]) -> None:
    _, path = written_decoder
    assert json.loads(run("verify", path, *OF_USER, "--json").stdout)["passed"]
    other = run("verify", path, *OF_USER, "--model-arg", "seed=1", code=None)
    assert "does not compute what users_decoder:build computes" in other.stderr
    (layer, *_) = json.loads(run("bisect", path, *OF_USER, "--json").stdout)["layers"]
    assert layer["own"]["passed"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("-i", "input_ids:int64[2,3]"), "--input does not go with --decoder"),
        (("--dynamic", "input_ids:0=batch"), "--dynamic does not go with --decoder"),
        (("--output-names", "logits"), "--output-names does not go with --decoder"),
        (("--genai", "bodies", "-t", "pt2", "-o", "decoder.pt2"), "--genai goes with --decoder and an ONNX file"),
        (("--genai", "bodies", "--form", "custom"), "--genai bodies does not go with --form custom"),
        (("-t", "opencv"), "--decoder needs dynamic axes"),
    ],
)
def test_what_does_not_go_with_decoders_is_refused(options: tuple[str, ...], error: str, users_folder: Path) -> None:
    assert error in fails("export", *OF_USER, *options)
    assert not list(users_folder.glob("decoder.pt2"))
    assert "or --decoder for a decoder of transformers" in fails("export", *OF_USER[:2])


def test_the_mode_of_the_model_is_kept() -> None:
    model = build_decoder("gpt2").train()
    decoder_arguments(model)
    assert model.training


def generated(model: Any, ids: Tensor, mask: Tensor) -> np.ndarray:
    """Eight more tokens, whatever they are."""
    options = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
    return model.generate(ids, attention_mask=mask, **options).numpy()


def generated_by_genai(folder: Path) -> np.ndarray:
    """The first row of IDS and eight more tokens, by onnxruntime-genai."""
    opened = genai.Model(str(folder))
    parameters = genai.GeneratorParams(opened)
    parameters.set_search_options(max_length=14, min_length=14)
    generator = genai.Generator(opened, parameters)
    generator.append_tokens(IDS[0].numpy().astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return generator.get_sequence(0)


@pytest.mark.slow
def test_a_decoder_is_one_file_for_the_prompt_and_for_each_token(written_decoder: tuple[Any, Path]) -> None:
    model, path = written_decoder
    file = load(path)
    axes = {info.name: info.shape for info in (*file.inputs, *file.outputs)}
    assert axes["attention_mask"] == ("batch", "past + sequence")
    assert axes["past_key_values.1.key"][2] == "past"
    assert axes["present.1.value"][2] == "past + sequence"
    assert set(file.implementations.values()) == {"kernel"}
    ids = torch.where(PADDED.bool(), IDS, 0)
    found = generate(file, file, {"input_ids": ids.numpy(), "attention_mask": PADDED.numpy()}, 8)
    np.testing.assert_array_equal(found, generated(model, ids, PADDED)[:, -8:])


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def with_window(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A Mistral with a window that is shorter than the prompt."""
    torch.manual_seed(0)
    model = convert_normal_norm(build_decoder("mistral", sliding_window=4), rms_norms=True).eval()
    path = tmp_path_factory.mktemp("window") / "decoder.onnx"
    export(model, f=path, dtype=request.param, **decoder_arguments(model))
    return model.half() if request.param == "fp16" else model, path


@pytest.mark.slow
def test_a_window_slides_in_both_dtypes(with_window: tuple[Any, Path]) -> None:
    model, path = with_window
    file = load(path)
    assert set(file.implementations.values()) == {"kernel"}
    found = generate(file, file, {"input_ids": IDS.numpy(), "attention_mask": PADDED.numpy()}, 8)
    np.testing.assert_array_equal(found, generated(model, IDS, PADDED)[:, -8:])


@pytest.mark.slow
def test_weights_of_four_bits_beside_whole_norms(with_window: tuple[Any, Path], tmp_path: Path) -> None:
    _, path = with_window
    quantizer = MatMulNBitsQuantizer(onnx.load(path), block_size=32, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(str(tmp_path / "decoder.onnx"), use_external_data_format=False)
    whole, quantized = load(path), load(tmp_path / "decoder.onnx")
    assert quantized.implementations == whole.implementations == dict.fromkeys(whole.implementations, "kernel")
    cache = {name: array[:, :, :5] for name, array in step_of(whole).items() if name.startswith("past")}
    given = {"input_ids": IDS.numpy()[:1], "attention_mask": np.ones((1, 11), np.int64), **cache}
    given["position_ids"] = np.arange(5, 11)[None]
    logits, expected = (np.float32(file(**given)[0]).reshape(-1) for file in (quantized, whole))
    assert 0.98 < np.corrcoef(logits, expected)[0, 1] < 1


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [False, True])
def test_onnxruntime_genai_generates_the_same_tokens(
    kernels: bool, written_decoder: tuple[Any, Path], tmp_path: Path
) -> None:
    """By the bodies, which need no library; and by the kernels, which alone run a file of the form custom."""
    model, path = written_decoder
    path = change_form(path, tmp_path / "decoder.onnx", form="custom" if kernels else "portable").path
    if kernels:
        with pytest.raises(InputError, match=r"its form is custom.*kernels=True"):
            write_genai_config(path, model)
    write_genai_config(path, model, kernels=kernels)
    np.testing.assert_array_equal(generated_by_genai(tmp_path), generated(model, IDS[:1], ONES[:1])[0])


@pytest.mark.slow
def test_a_float32_cache_of_a_half_file(decoder: nn.Module, tmp_path: Path) -> None:
    """The same tokens, in onnxruntime-genai too."""
    found = []
    for keeps in (False, True):
        folder = tmp_path / str(keeps)
        folder.mkdir()
        options: dict[str, Any] = {"dtype": "fp16", "keep_io_types": keeps, "verify": keeps}
        path = export(decoder, f=folder / "decoder.onnx", **options, **decoder_arguments(decoder)).path
        file = load(path)
        cache = {info.dtype for info in file.inputs if info.name.startswith("past")}
        assert cache == {np.dtype(np.float32 if keeps else np.float16)}
        write_genai_config(path, decoder)
        found.append(generated_by_genai(folder))
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
def test_the_sample_generates_the_same_tokens_in_every_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A LLaMA of transformers. The program compares the tokens itself, and ends with an error if they differ."""
    monkeypatch.syspath_prepend(SAMPLES)
    monkeypatch.setattr(sys, "argv", ["generate_text.py", "--steps", "10", "--tokens", "16", "--output", str(tmp_path)])
    runpy.run_path(str(SAMPLES / "generate_text.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "decoder.onnx: 171 nodes, 5 normalizations, equal to PyTorch" in printed
    ways = re.findall(r"^ *[\d,]+ tokens/s  (.*)$", printed, re.MULTILINE)
    assert {"nnorm_export.load, by kernels", "onnxruntime alone, by bodies", "onnxruntime-genai, by kernels"} < {*ways}


FEATURES = torch.randn(2, 20, 100)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (FEATURES, "give the tensors that the encoder of WhisperForConditionalGeneration takes, by name"),
        ({}, "give the tensors that the encoder"),
        ({"input_features": FEATURES, "attention_mask": None}, "give the tensors that the encoder"),
        ({"input_feature": FEATURES}, "has input_feature, which the encoder of WhisperForCond.* does not take"),
        ({"input_features": FEATURES, "decoder_input_ids": IDS}, "has decoder_input_ids, which the encoder"),
        ({"input_features": FEATURES[:1]}, r"batches of \[1\]; give all one batch of 2 or more rows"),
        ({"input_features": torch.tensor(1.0)}, r"batches of \[0\]"),
    ],
)
def test_what_no_encoder_takes_is_refused(given: Any, error: str) -> None:
    with pytest.raises(InputError, match=error):
        encoder_decoder_arguments(build_decoder("whisper"), given)


def test_a_model_without_keys_and_values_is_refused() -> None:
    config = transformers.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=20, state_size=4)
    with pytest.raises(InputError, match="MambaForCausalLM does not take past_key_values"):
        decoder_arguments(transformers.MambaForCausalLM(config))


ONES = torch.ones_like(IDS)
PADDED = torch.cat([ONES[:1], torch.tensor([[0, 0, 0, 1, 1, 1]])])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "norms", "mask", "other"), [("Llama", 5, PADDED, ONES), ("Gemma2", 9, ONES, PADDED)])
def test_the_rms_norms_of_a_decoder_are_converted_trained_and_exported(
    name: str, norms: int, mask: Tensor, other: Tensor, tmp_path: Path
) -> None:
    """The file takes every mask: transformers drops one of ones while it is traced, and padding masks whole rows."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "head_dim": 8}
    config = getattr(transformers, f"{name}Config")(num_attention_heads=4, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model, report = convert_normal_norm(model, rms_norms=True, return_report=True)
    assert [entry.norm for entry in report.converted] == ["LayerNormalNorm"] * norms
    assert not report.kept
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        losses.append(model(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    kwargs = {"input_ids": IDS, "attention_mask": mask, "use_cache": False}
    exported = export(model.eval(), (), tmp_path / "model.onnx", kwargs=kwargs)
    assert exported.parity
    assert len(exported.layers) == norms
    (logits,) = load(tmp_path / "model.onnx")(IDS.numpy(), other.numpy())
    expected, of_example = (model(input_ids=IDS, attention_mask=each).logits.detach().numpy() for each in (other, mask))
    counts = other.numpy().astype(bool)
    np.testing.assert_allclose(logits[counts], expected[counts], rtol=1e-4, atol=1e-5)
    assert not np.allclose(expected[counts], of_example[counts], atol=1e-3), "the mask matters"
