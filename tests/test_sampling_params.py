"""`SamplingParams`: what it accepts, and that a filter it does not implement is refused by name."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from torch_specops import SamplingParams


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert torch.equal(params.temperatures(batch=3), torch.ones(3))


@pytest.mark.parametrize("temperature", [0, 0.7, 1, 5.5])
def test_one_temperature_for_all(temperature: float) -> None:
    got = SamplingParams(temperature=temperature).temperatures(batch=3)
    assert got.dtype == torch.float32 and got.is_contiguous()
    assert torch.equal(got, torch.full((3,), float(temperature)))
    assert SamplingParams(temperature=temperature).temperatures(batch=0).shape == (0,)


@pytest.mark.parametrize(
    "temperature",
    [
        [0, 0.5, 2],
        (0, 0.5, 2),
        torch.tensor([0.0, 0.5, 2.0]),
        torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64),
        torch.tensor([0.0, 0.5, 2.0], dtype=torch.bfloat16),
    ],
)
def test_one_temperature_per_sequence(temperature: object) -> None:
    got = SamplingParams(temperature=temperature).temperatures(batch=3)  # type: ignore[arg-type]
    assert got.dtype == torch.float32
    assert got.tolist() == [0.0, 0.5, 2.0]


def test_device() -> None:
    for temperature in (0.5, [0.5, 0.6]):
        assert SamplingParams(temperature=temperature).temperatures(batch=2, device="meta").device.type == "meta"


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_wrong_number_of_sequences(batch: int) -> None:
    with pytest.raises(ValueError, match=rf"temperature: expected one number or {batch}, got shape \[3\]"):
        SamplingParams(temperature=[0.0, 0.5, 2.0]).temperatures(batch=batch)


# Finite in float64 and infinite in float32, as 1e-50 is positive and then zero.
DOUBLE = torch.tensor(1e300, dtype=torch.float64)


@pytest.mark.parametrize(
    "temperature",
    [-0.1, -1, math.nan, math.inf, -math.inf, [0.5, -1.0], torch.tensor([0.5, math.nan]), 1e-50, DOUBLE],
)
def test_temperature_out_of_range(temperature: object) -> None:
    with pytest.raises(ValueError, match="temperature: expected finite numbers >= 0, got"):
        SamplingParams(temperature=temperature)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p", "min_p"])
@pytest.mark.parametrize(
    "value",
    [
        None,
        "0.5",
        ["a", "b"],
        True,
        [True, False],
        1j,
        torch.ones(2, 2),
        torch.tensor([True]),
        {"a": 1},
        [[1.0], [2.0]],
    ],
)
def test_not_a_number(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{field}: expected a number or one per sequence, got "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 1),
        ("top_k", 50),
        ("top_k", -1),
        ("top_k", [0, 3]),
        ("top_k", torch.tensor([0, 0, 1])),
        ("top_p", 0.9),
        ("top_p", 0.0),
        ("top_p", [1.0, 0.5]),
        ("top_p", float("nan")),
        ("min_p", 0.05),
        ("min_p", [0.0, 0.1]),
    ],
)
def test_filters_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(NotImplementedError, match=rf"^{field}: .*expected .*, got "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"), [("top_k", [0, 0]), ("top_p", torch.ones(2)), ("top_p", 1), ("min_p", 0), ("min_p", (0.0, 0.0))]
)
def test_a_filter_at_its_default_is_no_filter(field: str, value: object) -> None:
    assert SamplingParams(**{field: value}).temperatures(1).tolist() == [1.0]  # type: ignore[arg-type]


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0  # type: ignore[misc]
