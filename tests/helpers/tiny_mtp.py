"""Tiny checkpoints with MTP weights, in the names that families publish, and what their layers compute in plain steps
over a whole text."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from tiny_hybrids import PROMISED
from tiny_models import VOCAB, sharp_model
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

LAYERS = 2
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 256}
_MOE = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
_MOE |= {"first_k_dense_replace": 1, "topk_group": 1}
_MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}

# model type -> config fields
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _SIZES | _MOE | _MLA | {"num_key_value_heads": 4, "n_group": 2},
    "glm4_moe": _SIZES | _MOE | {"num_key_value_heads": 2, "head_dim": 8, "n_group": 1},
    "mellum": _SIZES
    | {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16, "sliding_window": 4},
    "qwen2": _SIZES | {"num_key_value_heads": 2},
    **{kind: PROMISED[kind] for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
}
# The number of the layer, `{}`, is its number after the model's layers where True.
_DEEPSEEK = {part: f"model.layers.{{}}.{part}" for part in ("enorm", "hnorm", "eh_proj")}
_DEEPSEEK |= {"norm": "model.layers.{}.shared_head.norm", "block": "model.layers.{}"}
_QWEN = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc"}
_QWEN |= {"norm": "mtp.norm", "block": "mtp.layers.{}"}
_MIMO = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm"}
_MIMO = {part: f"model.mtp_layers.{{}}.{name}" for part, name in _MIMO.items()} | {"block": "model.mtp_layers.{}"}


def names_of(kind: str) -> tuple[dict[str, str], bool]:
    """The published names of the parts, and whether layers are counted on."""
    if kind in ("deepseek_v3", "glm4_moe"):
        return _DEEPSEEK, True
    return (_MIMO if kind == "qwen2" else _QWEN), False


def is_known(kind: str) -> bool:
    """Whether this transformers has MTP of its own for a family."""
    if kind == "step3p7" and Version(transformers.__version__) < Version("5.20"):
        # It had, and could not rotate.
        return False
    return kind in CONFIG_MAPPING and hasattr(CONFIG_MAPPING[kind]().get_text_config(), "num_mtp_layers")


class TinyMtp:
    """A target, loaded from `folder`, and its MTP layers as layers of the larger model that both were cut from."""

    def __init__(
        self, kind: str, depth: int, seed: int = 0, vocab: int = VOCAB, dtype: Any = torch.float64, **more: Any
    ) -> None:
        self.kind, self.depth = kind, depth
        total = LAYERS + depth
        fields = {"vocab_size": vocab, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        fields |= FAMILIES[kind] | more | {"num_hidden_layers": total}
        if "layer_types" in fields:
            fields["layer_types"] = ["linear_attention", "full_attention"] + ["full_attention"] * depth
        if kind == "mellum":
            fields["layer_types"] = ["full_attention", "sliding_attention"] + ["sliding_attention"] * depth
        self.whole = sharp_model(CONFIG_MAPPING[kind](**fields), seed)
        size = self.whole.config.hidden_size
        self.parts: list[dict[str, Tensor]] = []
        for index in range(depth):
            scales = {name: 1 + 0.2 * torch.randn(size).double() for name in ("enorm", "hnorm", "norm")}
            self.parts.append(scales | {"eh_proj": 0.3 * torch.randn(size, 2 * size).double()})
            if names_of(kind)[0] is _QWEN and index > 0:
                self.parts[-1] = self.parts[0]
        self.folder = Path(tempfile.mkdtemp(prefix=f"mtp_{kind}_"))
        self._save()
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).eval()
        if hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")
        # A published class names layer 61 here, and only then does transformers find the layers.
        if names_of(kind)[1]:
            patterns = [rf"model\.layers\.{LAYERS + index}\..*" for index in range(depth)]
            self.model._keys_to_ignore_on_load_unexpected = patterns

    def __del__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _save(self) -> None:
        self.whole.save_pretrained(self.folder)
        file, (names, counts_on) = self.folder / "model.safetensors", names_of(self.kind)
        weights = load_file(file)
        for index, parts in enumerate(self.parts):
            number = LAYERS + index if counts_on else index
            for name in [each for each in weights if each.startswith(f"model.layers.{LAYERS + index}.")]:
                rest = name.removeprefix(f"model.layers.{LAYERS + index}")
                weights[names["block"].format(number) + rest] = weights.pop(name)
            weights |= {f"{names[part].format(number)}.weight": tensor.clone() for part, tensor in parts.items()}
            if counts_on:
                weights[f"model.layers.{number}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
                weights[f"model.layers.{number}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
        save_file(weights, file, metadata={"format": "pt"})
        path = self.folder / "config.json"
        config = json.loads(path.read_text()) | {"num_hidden_layers": LAYERS}
        for name in ("layer_types", "mlp_layer_types"):
            if config.get(name):
                config[name] = config[name][:LAYERS]
        if self.kind in ("deepseek_v3", "glm4_moe", "mellum"):
            config.pop("num_mtp_layers", None)
            config["num_nextn_predict_layers"] = self.depth
        path.write_text(json.dumps(config))

    @torch.no_grad()
    def plain_logits(self, text: Tensor, drafts: Tensor) -> Tensor:
        """[K, V]: what each of K drafts was drawn from, after a text [N], from nothing but whole texts."""
        decoder, size = self.whole.model, self.whole.config.hidden_size
        hidden = self.model.model(text.unsqueeze(0)).last_hidden_state[:, :-1].double()
        before = after = hidden
        tokens = torch.cat([text, drafts]).unsqueeze(0)
        logits = []
        for depth in range(len(drafts)):
            index = min(depth, self.depth - 1)
            parts, block = self.parts[index], decoder.layers[LAYERS + index]
            if depth >= self.depth:
                # The last layer again: its own output stands for the feature of one pair more.
                hidden = torch.cat([before, after[:, -1:]], 1)
            count = hidden.shape[1]
            embedded = decoder.embed_tokens(tokens[:, index + 1 : index + 1 + count])
            read = [self._norm(embedded, parts["enorm"]), self._norm(hidden, parts["hnorm"])]
            read = torch.cat(read[::-1] if self.kind == "qwen2" else read, -1) @ parts["eh_proj"].T
            places = torch.arange(count).unsqueeze(0) + index + 1
            distance = torch.arange(count).unsqueeze(1) - torch.arange(count)
            seen = (distance >= 0) & (distance < (4 if self.kind == "mellum" else size**2))
            kind = ("sliding_attention",) if self.kind == "mellum" else ()
            grid = places.expand(3, -1, -1) if self.kind.startswith("qwen3_5") else places
            angles = decoder.rotary_emb(read, grid, *kind)
            raw = block(read, position_embeddings=angles, position_ids=places, attention_mask=seen[None, None])
            normed = self._norm(raw, parts["norm"])
            # What the next one reads: for a layer of its own as it is below; for the same layer, its newest output.
            before, after = hidden, raw if names_of(self.kind)[1] else normed
            if depth + 1 < self.depth:
                hidden = normed
            logits.append(self.whole.lm_head(normed[0, -1]))
        return torch.stack(logits).float()

    def _norm(self, x: Tensor, scale: Tensor) -> Tensor:
        x = x * (x.square().mean(-1, keepdim=True) + self.whole.config.rms_norm_eps).rsqrt()
        # Qwen's later norms count their scales from one.
        return x * (scale + (self.kind.startswith("qwen3")))


tiny_mtp = functools.lru_cache(maxsize=None)(TinyMtp)


def tiny_step3p7(folder: Path, vocab: int) -> PreTrainedModel:
    """A Step-3.7 from a folder with two MTP layers that transformers has made: dense, with other heads where a window
    slides."""
    from transformers.modeling_layers import MtpModel

    kinds = ["full_attention", "sliding_attention", "full_attention"]
    sizes = _SIZES | {"vocab_size": vocab, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    sizes |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "share_expert_dim": 16}
    sizes |= {"num_hidden_layers": 3, "num_nextn_predict_layers": 2, "moe_layers_enum": "1,2", "sliding_window": 4}
    sizes |= {"layer_types": kinds + kinds[:2], "attention_other_setting": {"num_attention_heads": 6}}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CONFIG_MAPPING["step3p7"](text_config=sizes, vision_config=vision | {"image_size": 28, "patch_size": 14})
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config).double()
    layers = MtpModel(whole, 2).double().layers
    for parameter in (*whole.parameters(), *layers.parameters()):
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.2)
    whole.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in layers.state_dict().items():
        number, part, rest = name.split(".", 2)
        part = {"mtp_block": "", "post_norm": "shared_head.norm."}.get(part, f"{part}.")
        weights[f"model.layers.{3 + int(number)}.{part}{rest}"] = tensor.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    return model


def add_mtp_layer(folder: Path, root: str = "model.") -> None:
    """Let the checkpoint of a model, in which the text's layers are named under `root`, have a layer in the names of
    Qwen: a copy of its own second one."""
    weights = load_file(folder / "model.safetensors")
    for name in [each for each in weights if each.startswith(f"{root}layers.1.")]:
        weights[name.replace(f"{root}layers.1.", "mtp.layers.0.")] = weights[name].clone()
    size = weights[f"{root}norm.weight"].shape[0]
    weights |= {f"{_QWEN[part]}.weight": torch.ones(size) for part in ("enorm", "hnorm", "norm")}
    weights[f"{_QWEN['eh_proj']}.weight"] = torch.eye(size).repeat(1, 2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
