"""The scripts that reproduce the papers: cells are measured once, formulas give the printed numbers, closed forms are
the laws of the ops, and the pages have the JSON's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS, needs_benchmarks, script
from scipy import stats
from tiny_models import VOCAB, perturbed, tiny

import torch_specops

pytestmark = needs_benchmarks

DOCS = BENCHMARKS.parent / "docs"


def test_a_finished_cell_is_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evidence, path = script("evidence"), tmp_path / "new" / "found.json"
    measured: list[float] = []

    def measure(x: float, more: Any = None) -> dict[str, Any]:
        if x < 0:
            raise KeyboardInterrupt
        measured.append(x)
        return {"twice": 2 * x, "pair": (x, more)}

    cells = [evidence.Cell(f"row/{x}", measure, {"x": x}) for x in (1, 2.5, -1)]
    with pytest.raises(KeyboardInterrupt):
        evidence.run(path, cells)
    # What was finished before the interrupt is in the file, as JSON gives it back.
    found = evidence.run(path, cells[:2])
    assert measured == [1, 2.5]
    assert found == {"row/1": {"twice": 2, "pair": [1, None]}, "row/2.5": {"twice": 5.0, "pair": [2.5, None]}}
    # Other settings are another measurement, a cell may read an earlier one, and one that is missing is kept or named.
    later = [
        evidence.Cell("row/1", measure, {"x": 7}),
        evidence.Cell("row/2.5", measure, {"x": 2.5}, "no model"),
        evidence.Cell("reads", measure, {"x": 3}, reads={"more": "row/1"}),
        evidence.Cell("absent", measure, {"x": 4}, "no model"),
    ]
    found = evidence.run(path, later)
    assert measured == [1, 2.5, 7, 3] and set(found) == {"row/1", "row/2.5", "reads"}
    assert found["reads"]["pair"] == [3, {"twice": 14, "pair": [7, None]}]
    assert "not run, no model: absent" in capsys.readouterr().err
    # A cell that the script no longer has stays in the file.
    evidence.run(path, [evidence.Cell("row/9", measure, {"x": 9})])
    assert list(json.loads(path.read_text())["cells"]) == ["row/9", "row/1", "row/2.5", "reads"]


def test_the_formulas_give_the_printed_numbers(tmp_path: Path) -> None:
    found = script("leviathan_theory").main(["--out", str(tmp_path / "theory.json")])
    for row in found["table 1"]:
        assert round(row["speed"], 2) == row["paper_speed"]
        assert round(row["operations"], 2) == row["paper_operations"]
    for row in found["table 4, expected"]:
        low, high = row["within_rounding"]
        assert low - 0.05 <= row["paper_expected"] <= high + 0.05
        assert low <= row["expected"] <= high
    assert all(round(row["factor"], 1) == row["paper_factor"] for row in found["appendix A.5, greedy"])
    # The sampled factors of appendix A.5 are above what theorem 3.8 gives for any gamma.
    assert all(row["factor_at_alpha_rounded_up"] < row["paper_factor"] - 0.05 for row in found["appendix A.5, sampled"])


@pytest.mark.slow
def test_acceptance_and_speed_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny sizes of the byte-level pair: what is drawn agrees with the formula."""
    measured = script("leviathan_measured")
    monkeypatch.setattr(measured, "WRITTEN", {"austen": (2, 32, 40)})
    monkeypatch.setattr(measured, "DRAFTS", {"austen": ("bigram", "prompt lookup", "small model", "early exit 2")})
    monkeypatch.setattr(measured, "PROVIDERS", {"austen": [["small model", 2]]})
    monkeypatch.setattr(measured, "TIMED", {"austen": (1, 32, 12)})
    found = measured.main(["--out", str(tmp_path / "measured.json")])
    for temperature in (0.0, 1.0):
        for draft in ("bigram", "small model", "early exit 2"):
            one = found[f"alpha/austen/{draft}/T={temperature}"]["1.0"]
            assert one["drawn"] == pytest.approx(one["alpha"], abs=4 * one["drawn_error"] + 1e-6)
            assert 0 < one["alpha"] < 1
            # Rejection sampling accepts less often.
            both = found[f"rejection/austen/{draft}"]
            assert temperature == 0 or both["rejection"] < both["alpha"] == one["alpha"]
        (provider,) = found[f"speed/austen/T={temperature}"]["providers"]
        expected = measured.predictions(found, "austen", temperature, provider)
        assert provider["speed"] > 0 and expected["theorem"] > 0 and expected["machine"] > 0


def test_nothing_that_was_measured_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of every cell are those of the committed file: `make evidence` has nothing to do."""
    pytest.importorskip("rouge_score")

    def pending(path: Path, cells: Any, *_: Any) -> list[str]:
        return [cell.key for cell in cells if cell.key not in evidence.read(path, cells)]

    evidence = script("evidence")
    monkeypatch.setattr(evidence, "run", pending)
    assert [script(name).main([]) for name in script("run").SCRIPTS] == [[]] * 4


def test_the_pages_have_the_numbers_of_the_json() -> None:
    """`python benchmarks/papers/run.py --only` writes what is missing here. It refuses a page that lacks a table or a
    number."""
    run = script("run")
    pages = {name: (DOCS / name).read_text(encoding="utf-8") for name in run.PAGES}
    found = run.load()
    assert {name: run.rewritten(page, run.PAGES[name], found) for name, page in pages.items()} == pages
    found["leviathan_theory"]["table 1"][0]["speed"] += 0.01
    found["leviathan_theory"]["figure 2"]["expected_tokens_per_step"][0][80] += 0.01
    found["chen"]["quality/austen/nucleus"]["rouge1"]["plain"] += 0.01
    found["wagner_text"]["main/topics"]["exact"]["step_ms_median"] *= 7
    # A part that was not measured.
    del found["leviathan_measured"]["alpha/austen/bigram/T=1.0"]
    for name, page in pages.items():
        changed = run.rewritten(page, run.PAGES[name], found)
        assert changed != page, name
        assert name != "evidence_leviathan.md" or "| austen | bigram | not run | not run |" in changed
        with pytest.raises(ValueError, match=r"expected each of .* once"):
            run.rewritten(page.replace("<!-- table: ", "", 1), run.PAGES[name], found)


def test_a_completion_passes_if_its_assertions_hold() -> None:
    code = script("chen_code")
    problem = code.PROBLEMS[0]
    assert problem.signature == "add(a, b)"
    for completion, parses, passes in (
        ("\n    return a + b\n\n\ndef more", True, True),
        ("\n    total = a\n\n    total += b\n    return total", True, True),
        ("\n    return a - b", True, False),
        ("\n    return (a + b", False, False),
        ("\n\n# nothing", False, False),
        ("\n    while True: pass", True, False),
        ("\n    import os\n    return a + b", True, False),
        ("\n    return a.__class__(a + b)", True, False),
        ("\n    return open('x')", True, False),
        ("\n    return [0] * 10**11", True, False),
    ):
        assert code.parses(problem, completion) is parses, completion
        assert code.passes(problem, completion, seconds=1) is passes, completion


TRIALS = 20_000
Z_P, Z_Q = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(3)).double() * 3


@pytest.mark.parametrize("scale, lenience", [(0.5, 1.0), (10.0, 1.0), (1e3, 1.0), (None, 0.5), (None, 0.1)])
def test_the_closed_form_is_the_law_of_the_op(scale: float | None, lenience: float) -> None:
    laws, q = script("wagner_laws"), Z_Q.softmax(-1)
    generator = torch.Generator().manual_seed(9)
    drafts = torch.multinomial(q[0], TRIALS, replacement=True, generator=generator).unsqueeze(1)
    rows = Z_P.float().expand(TRIALS, 2, 5), drafts, Z_Q.float().expand(TRIALS, 1, 5)
    uniforms = torch.rand(TRIALS, 1, generator=generator), torch.rand(TRIALS, generator=generator)
    if scale is None:
        law, accepted = laws.lenient_law(Z_P.softmax(-1), q, lenience)
        output, n = torch_specops.verify_exact(*rows, *uniforms, lenience=lenience)
    else:
        law, accepted = laws.emitted_law(q, *(laws.score(z, -scale, 2 * scale) for z in (Z_P, Z_Q)))
        output, n = torch_specops.verify_sigmoid(*rows, *uniforms, -scale, scale)
    counts = torch.bincount(output[:, 0], minlength=5)
    assert stats.chisquare(counts, TRIALS * law[0]).pvalue > 1e-3
    assert stats.chisquare(counts, TRIALS * Z_P.softmax(-1)[0]).pvalue < 1e-9
    assert abs(float(n.double().mean()) - float(accepted)) < 4 * (0.25 / TRIALS) ** 0.5


@pytest.mark.slow
def test_the_methods_take_turns_on_the_same_texts() -> None:
    methods = script("wagner_methods")
    target = tiny("llama")
    draft = perturbed(target, 0.1)
    constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    draft.generation_config.update(num_assistant_tokens=3, **constant)
    prompts = torch.tensor([[1, 17, 5], [1, 8, 9]])

    def decode(text: int, seed: int) -> list[int]:
        ids = prompts[text : text + 1]
        torch.manual_seed(seed)
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=draft, do_sample=True, max_new_tokens=12
        )
        return output[0, 3:].tolist()

    chosen = methods.without_compile(methods.METHODS) | {
        "sigmoid 10": {"method": "sigmoid", "alpha": -10.0, "beta": 10.0}
    }
    found = methods.measure(chosen, decode, 2, range(3), VOCAB, "cpu")
    assert list(found) == list(chosen)
    baseline, exact = found[methods.BASELINE], found[methods.EXACT]
    assert baseline["outputs"] == [decode(text, seed) for text in range(2) for seed in range(3)]
    assert exact["outputs"] == baseline["outputs"] and exact["identical"] == baseline["identical"] == 6
    assert found[methods.UNIFORM]["identical"] < 6 and found[methods.SIGMOID]["identical"] < 6
    for own in found.values():
        assert own["new_tokens"] == 72 and 0 < own["accepted"] <= own["drafted"] and own["steps"] >= 12
        assert 0 < own["seconds"] < own["wall_seconds"]
