"""Which method a published drafter has, and which class reads it, by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .layers import field_of

ZLAB, ZLAB2, SPECFORGE, DEEPSPEC = "DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel", "Qwen3DSparkModel"
EAGLE, DEEPSPEC_EAGLE = "LlamaForCausalLMEagle3", "Qwen3Eagle3Model"
MUSE = "muse_glimmer_assistant"
METHODS = {ZLAB: "dflash", ZLAB2: "dflash2", SPECFORGE: "dspark", DEEPSPEC: "dspark"}
METHODS |= {EAGLE: "eagle3", DEEPSPEC_EAGLE: "eagle3"}
# A head of EAGLE's layout with one of these fields is a P-EAGLE head.
MASK_TOKENS = ("ptd_token_id", "pard_token")
READERS: dict[Any, str] = {
    **dict.fromkeys(("dflash", "dflash2", "dspark"), "DFlash"),
    "eagle3": "Eagle3",
    "peagle": "PEagle",
}
LAYOUTS = {
    "DFlash": f"architectures {[ZLAB]}, {[ZLAB2]}, {[SPECFORGE]} or {[DEEPSPEC]}, speculators_model_type 'dflash', "
    f"'dflash2' or 'dspark', or model_type {MUSE!r}",
    "Eagle3": f"architectures {[EAGLE]} or {[DEEPSPEC_EAGLE]}, or speculators_model_type 'eagle3'",
    "PEagle": f"architectures {[EAGLE]} with {' or '.join(MASK_TOKENS)}, or speculators_model_type 'peagle'",
}
# What to do with other drafters, by their method, `model_type` or an architecture.
ADVICE: dict[Any, str] = {
    **{method: f"drafts.{reader} reads it" for method, reader in READERS.items()},
    "mtp": "stitch speculators' MTP layers into the target's checkpoint and use drafts.MTP",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "load it with transformers' AutoModelForCausalLM (5.23 cannot), for drafts.Gemma4Assistant",
    ),
    **dict.fromkeys(("Gemma4DSparkModel", "Gemma4Eagle3Model"), "DeepSpec's drafters for Gemma 4 are not read"),
}
OTHERS = "Domino, XPress and other drafters compute otherwise, and are not read"


def method_of(raw: Mapping[str, Any], reader: str) -> str:
    """The method of a drafter that the class `reader` reads, such as "dspark"; a ValueError for other drafters."""
    kind, model_type = field_of(raw, "speculators_model_type", str), field_of(raw, "model_type", str)
    architectures = field_of(raw, "architectures", str, is_list=True) or []
    masks, method = [name for name in MASK_TOKENS if raw.get(name) is not None], kind
    if kind is None:
        known = [METHODS[each] for each in architectures if each in METHODS]
        method = "dflash" if model_type == MUSE else known[0] if len(known) == 1 else None
        method = "peagle" if EAGLE in architectures and method == "eagle3" and masks else method
    if READERS.get(method) == reader:
        return method
    advice = [ADVICE[each] for each in (method, model_type, *architectures) if each in ADVICE]
    raise ValueError(
        f"config: expected {LAYOUTS[reader]}, got {architectures}{''.join(f' with {name}' for name in masks)}, "
        f"{kind!r} and {model_type!r}; {(*advice, OTHERS)[0]}"
    )
