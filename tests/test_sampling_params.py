"""`SamplingParams`: what it accepts, and the tensors that the ops take."""

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


NAN = math.nan


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("top_k", -1, "integers >= 0"),
        ("top_k", [3, -2], "integers >= 0"),
        ("top_p", 0.0, r"numbers in \(0, 1\]"),
        ("top_p", 1.0001, r"numbers in \(0, 1\]"),
        ("top_p", [0.5, NAN], r"numbers in \(0, 1\]"),
        ("min_p", -0.1, r"numbers in \[0, 1\]"),
        ("min_p", torch.tensor([0.5, 2.0]), r"numbers in \[0, 1\]"),
        ("min_p", NAN, r"numbers in \[0, 1\]"),
    ],
)
def test_filter_out_of_range(field: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: expected {expected}, got "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [2.0, [1.0, 2.0], torch.ones(2), NAN])
def test_top_k_counts(value: object) -> None:
    with pytest.raises(TypeError, match=r"^top_k: expected an integer or one per sequence, got "):
        SamplingParams(top_k=value)  # type: ignore[arg-type]


FILTERS = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("top_k", 50, [50, 50]),
        ("top_k", [0, 3], [0, 3]),
        ("top_k", torch.tensor([7, 0], dtype=torch.int32), [7, 0]),
        ("top_p", 0.5, [0.5, 0.5]),
        ("top_p", [1, 0.25], [1.0, 0.25]),
        ("min_p", (0.0, 1.0), [0.0, 1.0]),
        ("min_p", torch.tensor([0.5, 0.25], dtype=torch.float64), [0.5, 0.25]),
    ],
)
def test_filters_of_a_batch(field: str, value: object, expected: list[float]) -> None:
    params = SamplingParams(**{field: value})  # type: ignore[arg-type]
    got = getattr(params, f"{field}s")(batch=2)
    assert got.dtype == FILTERS[field] and got.is_contiguous() and got.tolist() == expected
    # What no row uses is None, and compiles away.
    assert all(getattr(params, f"{other}s")(batch=2) is None for other in FILTERS if other != field)
    tensors = params.tensors(batch=2)
    assert list(tensors.filters) == [field] and torch.equal(tensors.filters[field], got)
    assert getattr(params, f"{field}s")(batch=2, device="meta").device.type == "meta"


@pytest.mark.parametrize(
    ("field", "value"), [("top_k", [0, 0]), ("top_p", torch.ones(2)), ("top_p", 1), ("min_p", 0), ("min_p", (0.0, 0.0))]
)
def test_a_filter_at_its_default_is_no_filter(field: str, value: object) -> None:
    params = SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert params.tensors(batch=2).filters == {}


@pytest.mark.parametrize("field", FILTERS)
def test_wrong_number_of_filters(field: str) -> None:
    """Also where no row filters."""
    params = SamplingParams(**{field: [1, 1, 1]})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"{field}: expected one number or 2, got shape \[3\]"):
        params.tensors(batch=2)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0  # type: ignore[misc]
