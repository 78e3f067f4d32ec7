"""The decoding loop: `generate`, and the reusable `SpeculativeDecoder` behind it.

From the outside in: `decoder.py` (calls and prompts), `loop.py` (step after step), `runner.py` (runs a step eagerly,
compiled or captured), `step.py` (one step), `verify.py` (which op verifies it). Beside them are `inputs.py`,
`output.py`, `many.py` (more requests than rows), and `ragged.py` (reading rows with different numbers of drafts).
"""

from .decoder import SpeculativeDecoder
from .generate import generate
from .many import Completion, Request
from .output import GenerationOutput, GenerationStats, Step

__all__ = [
    "Completion",
    "GenerationOutput",
    "GenerationStats",
    "Request",
    "SpeculativeDecoder",
    "Step",
    "generate",
]
