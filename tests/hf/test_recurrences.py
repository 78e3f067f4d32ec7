"""All tokens of a step in one call of a module with states, against transformers' own reading of single tokens."""

import inspect

import pytest
import torch
from marks import slow
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from torch_specops.hf import recurrences
from torch_specops.hf.cache import cache_argument
from torch_specops.hf.recurrences import StepStates, step_forward

SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LINEAR_AND_FULL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
DELTA = LINEAR_AND_FULL | {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 6, "mamba_n_groups": 2}
KIMI = LINEAR_AND_FULL | {"linear_num_heads": 4, "linear_head_dim": 6}
FAMILIES = {
    "qwen3_next": DELTA | {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA | {"linear_num_key_heads": 4},
    "granitemoehybrid": MAMBA | LINEAR_AND_FULL | {"num_local_experts": 0, "shared_intermediate_size": 24},
    "bamba": MAMBA | {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "nemotron_h": {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2,
    },
    "falcon_h1": MAMBA | {"num_hidden_layers": 1, "mamba_d_ssm": 64},
    "mamba2": {"num_hidden_layers": 1, "num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 6, "n_groups": 2},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "jamba": {
        "num_hidden_layers": 2, "mamba_d_state": 6, "mamba_dt_rank": 3, "attn_layer_period": 2, "attn_layer_offset": 1,
        "num_experts": 1,
    },
    "mamba": {"num_hidden_layers": 1, "state_size": 6},
    "falcon_mamba": {"num_hidden_layers": 1, "state_size": 6},
    "kimi_linear": KIMI,
    "bailing_hybrid": KIMI,
}  # fmt: skip
# Of each kind of module: gated delta rule, the same with a decay per channel, Mamba2, Mamba1, convolution alone.
KINDS = ["qwen3_5_text", "kimi_linear", "granitemoehybrid", "jamba", "lfm2"]
LENGTH = 14


class Texts:
    """Three texts, and all that transformers' own module computes of them, one token after another."""

    def __init__(self, kind):
        config = CONFIG_MAPPING[kind](**SIZES | FAMILIES[kind])
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).double().eval()
        self.module = next(each for each in model.modules() if _has_states(each))
        with torch.no_grad():
            for weights in self.module.parameters():
                weights.normal_(0, 0.4)
        self.hidden = torch.randn(3, LENGTH, config.hidden_size, dtype=torch.float64)
        name = cache_argument(type(self.module).forward)
        states, outputs = [], []
        with torch.no_grad():
            for text in self.hidden:
                cache = DynamicCache(config=config)
                for token in text:
                    outputs.append(self.module(token[None, None], **{name: cache}))
                    layer = cache.layers[self.module.layer_idx]
                    both = layer.conv_states[0], layer.recurrent_states[0]
                    states.append([None if each is None else each.clone() for each in both])
        self.outputs = torch.cat(outputs).view(3, LENGTH, -1)
        # The states behind every token, [3, LENGTH, ...]
        self.states = [
            None if each[0] is None else torch.cat(each).unflatten(0, (3, LENGTH)) for each in zip(*states, strict=True)
        ]

    def rings(self, starts, num_slots):
        """Rings in which the states before the positions `starts` [3] stand, and nothing else."""
        rings = []
        for states in self.states:
            ring = None if states is None else torch.full((3, num_slots, *states.shape[2:]), 7.0, dtype=states.dtype)
            for row, start in enumerate(starts if states is not None else ()):
                ring[row, start % num_slots] = states[row, start - 1] if start > 0 else 0
            rings.append(ring)
        return rings

    def read(self, rings, positions, rows=None, forward=None):
        positions = torch.as_tensor(positions)
        hidden = self.hidden[torch.arange(3) if rows is None else rows].gather(
            1, positions.unsqueeze(2).expand(-1, -1, self.hidden.shape[2])
        )
        states = StepStates(*rings, positions, rows)
        with torch.no_grad():
            return (forward or step_forward(self.module))(states, hidden_states=hidden)

    def check(self, rings, outputs, positions, rows=(0, 1, 2)):
        for output, row, places in zip(outputs, rows, positions, strict=True):
            _assert_close(output, self.outputs[row, places])
            for ring, states in zip(rings, self.states, strict=True):
                if ring is not None:
                    kept = [ring[row, (place + 1) % ring.shape[1]] for place in places]
                    _assert_close(torch.stack(kept), states[row, places])


def _assert_close(found, expected):
    # Recurrences compute in float32.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().amax()))


def _has_states(module):
    return "update_conv_state" in inspect.unwrap(type(module).forward).__code__.co_names


@pytest.fixture(scope="module")
def texts():
    """Texts(kind), each computed once."""
    kept = {}
    return lambda kind: kept[kind] if kind in kept else kept.setdefault(kind, Texts(kind))


def _positions(starts, count):
    return [list(range(start, start + count)) for start in starts]


# transformers 5.17 has no bailing_hybrid.
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind in CONFIG_MAPPING])
@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_tokens_at_once_equal_tokens_of_transformers(texts, kind, count):
    texts, starts = texts(kind), (0, 5, 3)
    # Slots are taken again, but for the state that was there.
    rings, positions = texts.rings(starts, count + 1), _positions(starts, count)
    texts.check(rings, texts.read(rings, positions), positions)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_go_back_and_on(texts, kind):
    texts, starts = texts(kind), torch.tensor([1, 0, 4])
    rings = texts.rings(starts.tolist(), 6)
    for kept, count in [([1, 3, 4], 4), ([5, 1, 2], 5), ([1, 1, 1], 1), ([2, 3, 1], 3)]:
        positions = _positions(starts.tolist(), count)
        texts.check(rings, texts.read(rings, positions), positions)
        starts += torch.tensor(kept).clamp(max=count)


@pytest.mark.parametrize("kind", KINDS)
def test_some_rows_are_read(texts, kind):
    texts, starts = texts(kind), (2, 5, 3)
    rings, rows, positions = texts.rings(starts, 6), torch.tensor([2, 0]), _positions((3, 2), 4)
    before = [None if ring is None else ring[1].clone() for ring in rings]
    texts.check(rings, texts.read(rings, positions, rows), positions, rows.tolist())
    for ring, row in zip(rings, before, strict=True):
        assert ring is None or torch.equal(ring[1], row)


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_that_is_read_twice(texts, kind):
    texts, starts, positions = texts(kind), (0, 5, 3), [[0, 0, 1], [5, 6, 6], [3, 4, 4]]
    rings = texts.rings(starts, 5)
    texts.check(rings, texts.read(rings, positions), positions)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", ["slot before", "slot behind", "other row"])
def test_wrong_states_are_found(texts, kind, wrong):
    texts, starts = texts(kind), (2, 5, 4)
    rings, positions = texts.rings(starts, 6), _positions(starts, 4)
    if wrong == "other row":
        rings = [None if ring is None else ring.roll(1, 0) for ring in texts.rings((2, 2, 2), 6)]
        positions = _positions((2, 2, 2), 4)
    else:
        rings = [None if ring is None else ring.roll(1 if wrong == "slot behind" else -1, 1) for ring in rings]
    with pytest.raises(AssertionError):
        texts.check(rings, texts.read(rings, positions), positions)


def _law_inputs(kind, count):
    """Operands [3, count, ...] of a recurrence, its weights, and its state's shape. The sizes are no multiples of a
    vector."""
    heads = lambda *sizes: torch.randn(3, count, *sizes)  # noqa: E731
    if kind == "causal_conv1d_fn":
        return {"inputs": heads(37)}, {"weight": torch.randn(37, 4), "bias": torch.randn(37)}, (37, 4)
    if kind == "mamba_selective_scan":
        given = {"hidden_states": heads(37), "dt": heads(37), "z": heads(37), "B": heads(19), "C": heads(19)}
        return given, {"A": -torch.rand(37, 19), "D": torch.randn(37), "delta_bias": torch.randn(37)}, (37, 19)
    if kind == "mamba2_chunk_scan":
        given = {"hidden_states": heads(6, 21), "dt": heads(6), "B": heads(3, 19), "C": heads(3, 19)}
        return given, {"A": -torch.rand(6), "D": torch.randn(6), "dt_bias": torch.randn(6)}, (6, 21, 19)
    g = -heads(6, *[21] * (kind == "chunk_kimi_delta_attention")).abs()
    given = {"query": heads(3, 21), "key": heads(3, 21), "value": heads(6, 19), "g": g, "beta": heads(6).sigmoid()}
    return given, {}, (6, 21, 19)


@pytest.mark.parametrize("kind", recurrences.EXCHANGED)
@pytest.mark.parametrize("parts", [[2], [1, 1], [3, 2], [1, 4]])
@pytest.mark.parametrize("is_cpu", [True, False])
def test_recurrence_state_is_the_same_in_parts(kind, parts, is_cpu, monkeypatch):
    monkeypatch.setattr(recurrences, "is_eager_cpu", lambda *tensors: is_cpu)
    torch.manual_seed(1)
    positions = torch.tensor([[4], [0], [7]]) + torch.arange(7)
    inputs, weights, shape = _law_inputs(kind, 7)
    ring = torch.randn(3, 8, *shape)

    def read(ring, begin, end):
        part = {name: each[:, begin:end] for name, each in inputs.items()}
        if kind == "causal_conv1d_fn":
            states = StepStates(ring, None, positions[:, begin:end])
            seen = states.update_conv_state(part["inputs"].transpose(1, 2), 0)
            return recurrences.convolve(seen, **weights, activation="silu").transpose(1, 2)
        states = StepStates(torch.empty(3, 8), ring, positions[:, begin:end])
        if kind == "mamba_selective_scan":
            part = {name: each.transpose(1, 2) for name, each in part.items()}
        output, state = recurrences.EXCHANGED[kind](**part, **weights, step=states)
        states.update_recurrent_state(state, 0)
        return output.transpose(1, 2) if kind == "mamba_selective_scan" else output

    at_once = ring.clone()
    expected = read(at_once, 0, 7)
    in_parts, begin = ring.clone(), 0
    for count in parts:
        assert torch.equal(read(in_parts, begin, begin + count), expected[:, begin : begin + count])
        begin += count
        slots = (positions[:, begin - 1] + 1) % 8
        assert torch.equal(in_parts[torch.arange(3), slots], at_once[torch.arange(3), slots])


# kimi_linear has the function of qwen3_5_text.
@pytest.mark.parametrize("kind", [slow(kind) if kind == "kimi_linear" else kind for kind in KINDS])
def test_compiled_in_one_graph(texts, kind):
    texts, starts = texts(kind), (2, 5, 3)
    torch._dynamo.reset()
    compiled = torch.compile(step_forward(texts.module), fullgraph=True, backend="aot_eager", dynamic=False)
    rings = texts.rings(starts, 6)
    addresses = [None if ring is None else ring.data_ptr() for ring in rings]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for begin in (0, 1):
            positions = _positions([start + begin for start in starts], 2)
            texts.check(rings, texts.read(rings, positions, forward=compiled), positions)
    assert [None if ring is None else ring.data_ptr() for ring in rings] == addresses


@pytest.mark.parametrize("kind", KINDS[:4])
def test_autocast_leaves_states_in_float32(texts, kind, monkeypatch):
    texts, starts = texts(kind), (2, 5, 3)
    positions, rings, plain = _positions(starts, 3), texts.rings(starts, 6), texts.rings(starts, 6)
    texts.read(plain, positions)
    read = StepStates.read

    def cast(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return read(*args)

    monkeypatch.setattr(StepStates, "read", cast)
    texts.check(rings, texts.read(rings, positions), positions)
    assert torch.equal(rings[1], plain[1])


def test_a_module_keeps_its_own_forward(texts):
    module = texts("qwen3_5_text").module
    own, attributes = type(module).forward, set(vars(module))
    names = dict(inspect.unwrap(own).__globals__)
    step_forward(module)
    assert type(module).forward is own and set(vars(module)) == attributes
    assert inspect.unwrap(own).__globals__ == names


def test_a_recurrence_that_is_not_known():
    config = CONFIG_MAPPING["zamba"](**SIZES | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]})
    model = AutoModelForCausalLM.from_config(config)
    assert [step_forward(each) for each in model.modules() if _has_states(each)] == [None]
