"""Trains a LLaMA with normality normalization, exports it as one file, and generates text with it in three runtimes.

The text is the documentation of Python's language, which every Python has; a token is one character. The generated
tokens are those of ``model.generate``, or the program ends with an error.

python samples/generate_text.py [--steps N] [--tokens N] [--output FOLDER]

Needs transformers beside the samples' packages. Where onnxruntime-genai is installed, it generates the text too.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import digits
import numpy as np
import onnxruntime
import torch
import transformers
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from torch import Tensor

import nnorm_export
from nnorm_export.layers import convert_normal_norm

TEXT = "\n".join(pydoc_data.topics.topics.values())
END = 0  # the token that ends a text
CHARACTERS = dict(enumerate(sorted(set(TEXT)), start=1))
BATCH, LENGTH = 16, 128
PROMPT = "The following sections describe the "
TURNS = 5

Tokens = NDArray[np.int64]
Generate = Callable[[Tokens, int], Tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="of training (default %(default)s, two minutes)")
    parser.add_argument("--tokens", type=int, default=90, help="characters to generate (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder of the files (default %(default)s)")
    options = parser.parse_args()
    if min(options.steps, options.tokens) < 1:
        parser.error("--steps and --tokens are 1 or more")
    torch.manual_seed(digits.SEED)
    twin = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=1 + len(CHARACTERS), hidden_size=192, intermediate_size=512, num_hidden_layers=2,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=1024,
            bos_token_id=END, eos_token_id=END, pad_token_id=END,
        )
    )  # fmt: skip
    # Before it is trained: a LayerNormalNorm subtracts a mean, and the RMSNorm in its place did not.
    model = convert_normal_norm(copy.deepcopy(twin), rms_norms=True)
    loss = train(model, options.steps)

    folder = options.output / "text"
    folder.mkdir(parents=True, exist_ok=True)
    report = nnorm_export.export(model, f=folder / "decoder.onnx", **nnorm_export.decoder_arguments(model))
    plain = folder / "twin" / "decoder.onnx"
    plain.parent.mkdir(exist_ok=True)
    arguments = nnorm_export.decoder_arguments(twin.eval())
    nnorm_export.export(twin, f=plain, passthrough=["LlamaRMSNorm"], **arguments)

    runner = nnorm_export.load(report.path)
    has_kernels = set(runner.implementations.values()) == {"kernel"}
    how = "by kernels" if has_kernels else "by bodies"
    ways: dict[str, Generate] = {
        "PyTorch, model.generate": by_pytorch(model),
        f"nnorm_export.load, {how}": by_load(runner),
        "onnxruntime alone, by bodies": by_onnxruntime(report.path),
    }
    twins: dict[str, Generate] = {"its twin with RMSNorm, nnorm_export.load": by_load(nnorm_export.load(plain))}
    if importlib.util.find_spec("onnxruntime_genai"):
        nnorm_export.write_genai_config(report.path, model, kernels=has_kernels)
        nnorm_export.write_genai_config(plain, twin)
        ways[f"onnxruntime-genai, {how}"] = by_genai(folder)
        twins["its twin with RMSNorm, onnxruntime-genai"] = by_genai(plain.parent)

    prompt = encoded(PROMPT)
    seconds, texts = generate_in_turns({**ways, **twins}, prompt, options.tokens)
    expected = texts["PyTorch, model.generate"]
    for way in ways:
        if not np.array_equal(texts[way], expected):
            raise SystemExit(f"{way} generated other tokens than PyTorch:\n{decoded(texts[way])}")
    print(f"{report.path}: {report.nodes} nodes, {len(report.layers)} normalizations, equal to PyTorch")
    print(f"loss {loss:.2f} after {options.steps} steps; the same {options.tokens} tokens in each runtime:\n")
    print(f"{PROMPT}|{decoded(expected)}\n")
    for way, taken in seconds.items():
        print(f"{options.tokens / taken:6,.0f} tokens/s  {way}")


def train(model: transformers.PreTrainedModel, steps: int) -> float:
    """Trains on random pieces of the text by AdamW; returns the mean loss of the last steps."""
    console = Console(stderr=True)
    text = torch.from_numpy(encoded(TEXT)[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, max(steps, 2))
    model.train()
    losses: list[float] = []
    for step in track(range(steps), "training", console=console, transient=True, disable=not console.is_terminal):
        starts = torch.randint(len(text) - LENGTH, (BATCH,))
        pieces = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        loss: Tensor = model(input_ids=pieces, labels=pieces).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if not console.is_terminal and step % -(-steps // digits.MOST_PROGRESS_LINES) == 0:
            digits.announce(f"training: step {step} of {steps}, loss {loss.item():.2f}")
    model.eval()
    return statistics.fmean(losses[-20:])


def encoded(text: str) -> Tokens:
    of = {character: token for token, character in CHARACTERS.items()}
    return np.array([[of[character] for character in text]])


def decoded(tokens: Tokens) -> str:
    return "".join(map(CHARACTERS.__getitem__, tokens.tolist()))


def by_pytorch(model: transformers.PreTrainedModel) -> Generate:
    def generate(prompt: Tokens, count: int) -> Tokens:
        ids = torch.from_numpy(prompt)
        how = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "suppress_tokens": [END]}
        found: Tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **how).numpy()
        return found[0, prompt.shape[1] :]

    return generate


def by_file(run: Callable[[dict[str, Any]], list[Any]], inputs: Sequence[Any], outputs: Sequence[Any]) -> Generate:
    """Greedily: the prompt first, then one token in each step, with the keys and values that the last step returned."""
    keys = [info for info in inputs if info.name.startswith("past_key_values")]
    empty = {info.name: np.zeros([1, info.shape[1], 0, info.shape[3]], np.float32) for info in keys}
    present = [info.name.replace("present", "past_key_values") for info in outputs[1:]]

    def generate(prompt: Tokens, count: int) -> Tokens:
        tokens, cache = prompt, dict(empty)
        found: list[int] = []
        for length in range(prompt.shape[1], prompt.shape[1] + count):
            positions = np.arange(length)[None, -tokens.shape[1] :]
            mask = np.ones((1, length), np.int64)
            logits, *returned = run({"input_ids": tokens, "attention_mask": mask, "position_ids": positions, **cache})
            cache = dict(zip(present, returned, strict=True))
            logits[..., END] = -np.inf
            found.append(int(logits[0, -1].argmax()))
            tokens = np.array([found[-1:]])
        return np.array(found)

    return generate


def by_load(runner: nnorm_export.Runner) -> Generate:
    return by_file(lambda feeds: runner(**feeds), runner.inputs, runner.outputs)


def by_onnxruntime(path: Path) -> Generate:
    """ONNX Runtime without the library of kernels: what every program with ONNX Runtime has."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return by_file(lambda feeds: session.run(None, feeds), session.get_inputs(), session.get_outputs())


def by_genai(folder: Path) -> Generate:
    genai: Any = importlib.import_module("onnxruntime_genai")
    model = genai.Model(str(folder))

    def generate(prompt: Tokens, count: int) -> Tokens:
        parameters = genai.GeneratorParams(model)
        length = prompt.shape[1] + count
        parameters.set_search_options(max_length=length, min_length=length)
        generator = genai.Generator(model, parameters)
        generator.append_tokens(prompt[0].astype(np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        found: Tokens = generator.get_sequence(0)[prompt.shape[1] :].astype(np.int64)
        return found

    return generate


def generate_in_turns(
    ways: dict[str, Generate], prompt: Tokens, count: int
) -> tuple[dict[str, float], dict[str, Tokens]]:
    """The median seconds of each way, all taking turns after one that warms up; and what each generated."""
    texts: dict[str, Tokens] = {}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(1 + TURNS):
        for way, generate in ways.items():
            start = time.perf_counter()
            texts[way] = generate(prompt, count)
            seconds[way].append(time.perf_counter() - start)
    return {way: statistics.median(taken[1:]) for way, taken in seconds.items()}, texts


if __name__ == "__main__":
    main()
