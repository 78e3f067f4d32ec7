"""Makes the EAGLE-3 heads beside it, and what the speculators library computes with them.

    pip install speculators==0.9.0 && python tests/data/make_eagle3_oracle.py

Each folder eagle3_NAME is what its `save_pretrained` writes for a tiny random head. expected/outputs.safetensors in it
has features [N, F * H] of the target's layers, the tokens [N] that follow each, three drafts [3] after the last one,
and the logits [3, draft_vocab_size] that each draft is drawn from.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

VOCAB, DRAFT_VOCAB, LENGTH, DRAFTS = 24, 10, 9, 3
SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
COMMON = SIZES | {"num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": 1e-5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> the layer's config, the tokens of the head, the rest of its config
HEADS: dict[str, tuple[PreTrainedConfig, int, dict[str, object]]] = {
    "llama": (LlamaConfig(**COMMON), DRAFT_VOCAB, {}),
    "llama_norms": (
        LlamaConfig(**COMMON, rope_parameters=LLAMA3, attention_bias=True),
        VOCAB,
        {"norm_before_residual": True, "norm_before_fc": True},
    ),
    "qwen3": (
        Qwen3Config(**COMMON),
        DRAFT_VOCAB,
        {"norm_output": True, "fc_norm": True, "eagle_aux_hidden_state_layer_ids": [1, 3]},
    ),
    "qwen3_window": (
        Qwen3Config(**COMMON, use_sliding_window=True, sliding_window=3, layer_types=["sliding_attention"]),
        DRAFT_VOCAB,
        {},
    ),
}


@torch.no_grad()
def make(name: str, layer: PreTrainedConfig, draft_vocab_size: int, rest: dict[str, object]) -> None:
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=DRAFTS)
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    library = SpeculatorsConfig(
        algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    )
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    fields = {"draft_vocab_size": draft_vocab_size, "speculators_config": library} | ids | rest
    model = Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=layer, **fields))
    torch.manual_seed(len(name))
    for parameter in model.parameters():
        nn.init.normal_(parameter, float(parameter.dim() == 1), 0.4)
    if draft_vocab_size < VOCAB:
        tokens = torch.randperm(VOCAB)[:draft_vocab_size].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[tokens] = True
        model.load_vocab_mappings(t2d, tokens - torch.arange(draft_vocab_size))

    found: list[Tensor] = []
    # The chain of drafts that begins after the last features that are given out; the tokens of a text lead it.
    model.lm_head.register_forward_hook(lambda module, inputs, logits: found.append(logits[0, LENGTH - 1].clone()))
    features = torch.randn(1, LENGTH + DRAFTS, model.fc.in_features)
    text = torch.randint(VOCAB, (1, LENGTH + DRAFTS))
    model(features, text, torch.zeros(1, LENGTH + DRAFTS, dtype=torch.int64), ttt_steps=DRAFTS)
    following, drafts = text[0, :LENGTH].clone(), text[0, LENGTH:].clone()

    folder = Path(__file__).parent / f"eagle3_{name}"
    model.save_pretrained(folder)
    # A copy of the library's own code, which nobody needs to read a head.
    (folder / "config.py").unlink()
    features = features[0, :LENGTH].clone()
    outputs = {"features": features, "following": following, "logits": torch.stack(found), "drafts": drafts}
    (folder / "expected").mkdir(exist_ok=True)
    save_file(outputs, folder / "expected" / "outputs.safetensors")
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)


if __name__ == "__main__":
    for name, head in HEADS.items():
        make(name, *head)
