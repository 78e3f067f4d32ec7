"""Whisper as CTranslate2 stores it, read into transformers.

A `model.bin` of version 6 is little-endian: u32 version, string, u32 revision, u32 count; for each variable a string
name, u8 rank, u32 per dimension, u8 dtype, u32 bytes, the data; then u32 count and pairs of strings, the aliases. A
string is a u16 length, its bytes and a NUL that the length counts.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

__all__ = ["read_variables", "whisper_model"]

VERSION = 6
DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)

# Settings of the architecture, which Whisper's implementation has built in, and what the logits do not depend on.
IGNORED = (
    *("activation", "alibi", "alibi_use_positive_positions", "alignment_heads", "alignment_layer", "pre_norm"),
    *("scale_alibi", "scale_embeddings", "start_from_zero_embedding"),
)


def read_variables(path: Path) -> dict[str, Tensor]:
    """Every variable of a `model.bin` by name. Its sha256 was checked, so its format is not."""
    data, at = path.read_bytes(), 0

    def numbers(form: str) -> tuple[int, ...]:
        nonlocal at
        found = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return found

    def string() -> str:
        nonlocal at
        (length,) = numbers("H")
        at += length
        return data[at - length : at - 1].decode()

    (version,) = numbers("I")
    if version != VERSION:
        raise ValueError(f"{path}: expected a CTranslate2 file of version {VERSION}, got {version}")
    string()
    _, count = numbers("II")
    variables = {}
    for _ in range(count):
        name, (rank,) = string(), numbers("B")
        shape = numbers(f"{rank}I")
        kind, size = numbers("BI")
        values = np.frombuffer(data, np.dtype(DTYPES[kind]).newbyteorder("<"), size // DTYPES[kind]().itemsize, at)
        variables[name] = torch.from_numpy(values.astype(DTYPES[kind]).reshape(shape))
        at += size
    return variables


def whisper_model(
    variables: dict[str, Tensor], eos_token_id: int, start_token_id: int
) -> WhisperForConditionalGeneration:
    """`WhisperForConditionalGeneration` in float32, its shape taken from the variables."""
    left = {name: value for name, value in variables.items() if name.removeprefix("decoder/") not in IGNORED}
    take = left.pop
    heads = {part: int(take(f"{part}/num_heads")) for part in ("encoder", "decoder")}

    state: dict[str, Tensor] = {}

    def put(name: str, values: Tensor) -> None:
        state[f"model.{name}"] = values.float()

    def linear(source: str, *names: str) -> None:
        """One stored matrix is one projection or several, stacked by rows."""
        weights, biases = (take(f"{source}/{kind}").chunk(len(names)) for kind in ("weight", "bias"))
        for name, weight, bias in zip(names, weights, biases, strict=True):
            put(f"{name}.weight", weight)
            # The keys have no bias in Whisper; the file has zeros for it.
            if not name.endswith("k_proj"):
                put(f"{name}.bias", bias)

    def norm(source: str, name: str) -> None:
        put(f"{name}.weight", take(f"{source}/gamma"))
        put(f"{name}.bias", take(f"{source}/beta"))

    layers = {}
    for part in ("encoder", "decoder"):
        put(f"{part}.embed_positions.weight", take(f"{part}/position_encodings/encodings"))
        norm(f"{part}/layer_norm", f"{part}.layer_norm")
        layers[part] = len({name.split("/")[1] for name in left if name.startswith(f"{part}/layer_")} - {"layer_norm"})
        for index in range(layers[part]):
            source, name = f"{part}/layer_{index}", f"{part}.layers.{index}"
            own = f"{name}.self_attn"
            norm(f"{source}/self_attention/layer_norm", f"{own}_layer_norm")
            linear(f"{source}/self_attention/linear_0", f"{own}.q_proj", f"{own}.k_proj", f"{own}.v_proj")
            linear(f"{source}/self_attention/linear_1", f"{own}.out_proj")
            if part == "decoder":
                cross = f"{name}.encoder_attn"
                norm(f"{source}/attention/layer_norm", f"{cross}_layer_norm")
                linear(f"{source}/attention/linear_0", f"{cross}.q_proj")
                linear(f"{source}/attention/linear_1", f"{cross}.k_proj", f"{cross}.v_proj")
                linear(f"{source}/attention/linear_2", f"{cross}.out_proj")
            norm(f"{source}/ffn/layer_norm", f"{name}.final_layer_norm")
            linear(f"{source}/ffn/linear_0", f"{name}.fc1")
            linear(f"{source}/ffn/linear_1", f"{name}.fc2")
    linear("encoder/conv1", "encoder.conv1")
    linear("encoder/conv2", "encoder.conv2")
    put("decoder.embed_tokens.weight", take("decoder/embeddings/weight"))
    if left:
        raise ValueError(f"expected no further variables, got {', '.join(sorted(left))}")

    vocab_size, d_model = state["model.decoder.embed_tokens.weight"].shape
    config = WhisperConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_mel_bins=state["model.encoder.conv1.weight"].shape[1],
        max_source_positions=state["model.encoder.embed_positions.weight"].shape[0],
        max_target_positions=state["model.decoder.embed_positions.weight"].shape[0],
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=heads["encoder"],
        decoder_attention_heads=heads["decoder"],
        encoder_ffn_dim=state["model.encoder.layers.0.fc1.weight"].shape[0],
        decoder_ffn_dim=state["model.decoder.layers.0.fc1.weight"].shape[0],
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id,
        decoder_start_token_id=start_token_id,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    # The output matrix is tied to the embeddings, which hold it.
    model.load_state_dict(state | {"proj_out.weight": state["model.decoder.embed_tokens.weight"]})
    return model.eval()
