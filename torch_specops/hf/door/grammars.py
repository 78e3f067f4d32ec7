"""Convert logits processors of xgrammar and outlines to `Grammar` objects."""

from __future__ import annotations

from typing import Any

from transformers.generation import LogitsProcessorList

from ...decode.inputs import AnyGrammar
from ...grammars import Grammar, llguidance, xgrammar
from .processors import FIRST_WARPER, STAGE


def take_grammars(
    processors: LogitsProcessorList, grammar: AnyGrammar, num_rows: int
) -> tuple[LogitsProcessorList, AnyGrammar]:
    """Remove the processor of a grammar from the list. Returns the other processors, and a new `Grammar` for each row.

    The arguments are returned unchanged if there is no such processor, if it has already been called, if a warper comes
    before it, or if a processor after it is not in `STAGE`.

    Args:
        grammar: the argument `grammar` of `custom_generate`.

    Raises:
        ValueError: `grammar` is given, and the list has a processor of a grammar.
    """
    for place, processor in enumerate(processors):
        before, after = processors[:place], processors[place + 1 :]
        row_grammars = _grammars_of(processor, num_rows)
        # The loop applies a grammar's mask after all processors and before the warpers. The mask may move there if no
        # warper comes before it, and if it commutes with every later processor. It does with those in STAGE.
        is_after_warper = any(STAGE.get(type(each), -1) >= FIRST_WARPER for each in before)
        if row_grammars is None or is_after_warper or any(type(each) not in STAGE for each in after):
            continue
        if grammar is not None:
            raise ValueError(f"grammar: expected None beside {_name_of(processor)} in logits_processor, got both")
        return LogitsProcessorList([*before, *after]), row_grammars
    return processors, grammar


def _grammars_of(processor: Any, num_rows: int) -> list[Grammar | None] | None:
    """A new `Grammar` for each row; None if the processor has no grammar or has already been called."""
    match _name_of(processor):
        case "xgrammar.contrib.hf.LogitsProcessor" if not processor.prefilled:
            compiled = list(processor.compiled_grammars)
            compiled = compiled * num_rows if len(compiled) == 1 else compiled
            return [xgrammar(each) for each in compiled] if len(compiled) == num_rows else None
        case "outlines.backends.xgrammar.XGrammarLogitsProcessor" if processor.is_first_token:
            return [xgrammar(processor.compiled_grammar) for _ in range(num_rows)]
        case "outlines.backends.llguidance.LLGuidanceLogitsProcessor" if processor.is_first_token:
            return [llguidance(processor.llg_tokenizer, processor.grammar) for _ in range(num_rows)]
    return None


def _name_of(processor: object) -> str:
    return f"{type(processor).__module__}.{type(processor).__qualname__}"
