"""What a model is, to be compared before and after others have used it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

# FSDP2 sets them in the first forward.
LATE = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


def reached(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """All that a value refers to, with its path."""
    yield path, value
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (nn.Module, PreTrainedConfig)):
        parts = [(name, part) for name, part in vars(value).items() if name not in LATE]
    elif isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple, set)):
        parts = enumerate(value)
    for name, part in parts:
        yield from reached(part, f"{path}.{name}", seen)


def state_of(*models: PreTrainedModel) -> dict[str, object]:
    """What models are: their modules, modes, attributes, configs and hooks, weights and buffers with their versions."""
    state: dict[str, object] = {}
    for number, model in enumerate(models):
        for path, value in reached(model, str(number), set()):
            state[path] = value if isinstance(value, (bool, int, float, str)) else id(value)
            if isinstance(value, Tensor):
                state[path] = "an inference tensor" if value.is_inference() else (id(value), value._version)
    return state


def changed(before: dict[str, object], *models: PreTrainedModel, swaps_weights: bool = False) -> list[str]:
    """`swaps_weights`: FSDP2 gathers weights into others in every forward, of its owner's too."""
    after = state_of(*models)
    places = [path for path in {**before, **after} if before.get(path, "") != after.get(path, "")]
    if swaps_weights:
        places = [path for path in places if "._parameters." not in path or after.get(path) == "an inference tensor"]
    return [f"changed {len(places)} places, such as {places[0]}"] if places else []
