"""OpenVINO GenAI's continuous batching on a CPU, with models in float32 that it converts from GGUF files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engines import NUM_DRAFT_TOKENS, Row, law_of, tiny_pair
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from torch_specops import SamplingParams

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
LAYER |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
LAYER |= {f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"}
LAYER |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """A Qwen3 whose weights float16 can hold, with a tokenizer that knows all bytes, which OpenVINO wants."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "qwen3")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    letters = [*bytes_to_unicode().values(), "ab"]
    writer.add_token_list([*letters, "<end>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(letters) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(len(letters))
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module not in NAMES:
            _, _, layer, part = module.split(".", 3)
            module = f"blk.{layer}.{LAYER[part]}"
        else:
            module = NAMES[module]
        writer.add_tensor(f"{module}.weight", (tensor.half() if tensor.dim() > 1 else tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class OpenVino:
    """`drafts`: "model", "lookup" or "none"."""

    def __init__(self, drafts: str) -> None:
        import openvino_genai

        target, draft = tiny_pair()
        self.law = law_of(target)
        self._drafts = drafts
        self._folder = tempfile.TemporaryDirectory(prefix="openvino_")
        folders = [Path(self._folder.name) / name for name in ("target", "draft")]
        for model, folder in zip((target, draft), folders, strict=True):
            folder.mkdir()
            write_gguf(model, folder / "model.gguf")
            # A draft is not read from a GGUF file, but from what is saved here.
            openvino_genai.LLMPipeline(str(folder / "model.gguf"), "CPU", enable_save_ov_model=True)
        helper: dict[str, Any] = {"lookup": {"prompt_lookup": True}}.get(drafts, {})
        if drafts == "model":
            helper = {"draft_model": openvino_genai.draft_model(str(folders[1]), "CPU", **EXACT)}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(folders[0]), scheduler, "CPU", EXACT | helper)
        self.steps = self.tokens = 0

    def __call__(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], seeds: Sequence[int], length: int
    ) -> list[list[int]]:
        import openvino
        from openvino_genai import GenerationConfig

        configs = []
        for each, seed in zip(params, seeds, strict=True):
            settings: dict[str, Any] = {"max_new_tokens": length, "ignore_eos": True}
            if each.temperature > 0:
                settings |= {"do_sample": True, "temperature": each.temperature, "top_p": each.top_p}
                settings |= {"rng_seed": seed} | ({"top_k": each.top_k} if each.top_k > 0 else {})
            if self._drafts != "none":
                settings |= {"num_assistant_tokens": NUM_DRAFT_TOKENS}
            if self._drafts == "lookup":
                settings |= {"max_ngram_size": 2}
            configs.append(GenerationConfig(**settings))
        texts = [openvino.Tensor(torch.tensor([prompt]).numpy()) for prompt in prompts]
        return [result.m_generation_ids[0] for result in self._pipeline.generate(texts, configs)]


WAYS = {"no-draft": ("no draft", "none"), "draft": ("draft model", "model"), "lookup": ("prompt lookup", "lookup")}
ROWS = {
    f"openvino-{name}": Row("openvino-genai", way, partial(OpenVino, drafts), 10_000)
    for name, (way, drafts) in WAYS.items()
}
