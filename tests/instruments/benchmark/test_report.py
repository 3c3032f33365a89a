"""Tests of texts with marked drafts on a mock target, and of the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from support.mock_target import MockTarget

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.cost.paired import compare_pairs
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import make_drafter
from ngramspec.instruments.benchmark.figures import Summary
from ngramspec.instruments.benchmark.report import benchmark_report, text_sections
from ngramspec.instruments.benchmark.runs import Benchmark
from ngramspec.instruments.prompts import Case
from ngramspec.instruments.reports.report import Passage, Report
from ngramspec.policies import make_policy
from ngramspec.steps import Stats

SETUP = ("m.gguf", "m.gguf (tiny); here")


def benchmark(folder: Path) -> Benchmark:
    rng = np.random.default_rng(5)
    texts = [tuple(int(t) for t in rng.integers(0, 16, 20)) for _ in range(3)]
    cases = [Case("even" if i % 2 == 0 else "odd", f"p{i}", text) for i, text in enumerate(texts)]
    how = {"drafter": "ngram", "policy": "fixed", "exact": "off", "calibration_folder": folder}
    decoder = SpeculativeDecoder(MockTarget(peak=8.0), **how)
    return Benchmark(decoder, cases, 40, 1, make_untrained=lambda _: (make_drafter("ngram"), make_policy("fixed")))


def test_text_sections_mark_tokens_of_first_text_per_category(tmp_path: Path) -> None:
    made = benchmark(tmp_path)
    made.warm_up()
    runs = [run for run in made.measure() if run.kind == "drafted"]
    (texts,) = text_sections(made)
    assert [passage.name for passage in texts.figures] == ["even: p0", "odd: p1"]
    piece = made.drafted.vocabulary.piece
    for passage, run in zip(texts.figures, runs, strict=False):
        assert isinstance(passage, Passage)
        text = "".join(text for text, mark in passage.spans if mark != "refused")
        assert text == b"".join(map(piece, run.output)).decode()
    marks = {mark for passage in texts.figures for _, mark in passage.spans}
    assert marks == {"", "kept", "refused", "corrected"}


# --------------------------------------------------------------------------- the report


def row(report: Report, number: int) -> dict[str, str]:
    return dict(zip(report.table.headings, report.table.rows[number], strict=True))


def a_summary(identical: int, ratio: float | None = None, low: float = 0.5, high: float = 2.0) -> Summary:
    gain = None if ratio is None else compare_pairs([low, *[ratio] * 7, high])
    return Summary("a", 3, 9, ratio, ratio, None, ratio, gain, None, Stats(), identical)


def test_benchmark_report_names_differing_texts(tmp_path: Path) -> None:
    summaries = [a_summary(2, 1.0, 0.5, 2.0), a_summary(3)]
    made = benchmark(tmp_path)
    report = benchmark_report(*SETUP, "c", made, {"cost": summaries})
    shown = {"plain t/s": "1.0", "ratio": "1.00x", "gain": "not clear", "same text": "2 of 3"}
    assert row(report, 0) | shown == row(report, 0)
    assert row(report, 1) | dict.fromkeys(("plain t/s", "ratio", "gain"), "-") | {"same text": "3 of 3"} == row(
        report, 1
    )
    assert report.headline == "no speed measured"  # The last row has no ratio.
    assert "INCOMPLETE: stopped after 0 of 6 runs" in report.notes
    assert benchmark_report(*SETUP, "c", made, {"cost": []}).table.rows == []
    made.acceptance = Acceptance(lenience=0.5)
    lossy = benchmark_report(*SETUP, "c", made, {"cost": summaries})
    assert row(lossy, 0)["same text"] == "-"
    assert any("lenience 0.5 changes the output" in note for note in lossy.notes)


def test_benchmark_report_draws_a_gain_that_may_be_noise_as_no_result(tmp_path: Path) -> None:
    summaries = [a_summary(3, 1.1, 0.9, 1.2), a_summary(3, 1.3, 1.1, 1.4)]
    summaries[0] = replace(summaries[0], gain=compare_pairs([0.9, *[1.1] * 6, 1.2]))
    bars = benchmark_report(*SETUP, "c", benchmark(tmp_path), {"cost": summaries}).bars.bars
    assert [(bar.label, bar.other) for bar in bars] == [("1.10x, not clear", True), ("1.30x", False)]
    assert [(bar.low, bar.high) for bar in bars] == [(0.9, 1.2), (1.3, 1.3)]


def test_benchmark_report_headline_states_gain_of_each_policy(tmp_path: Path) -> None:
    summaries = [a_summary(3), a_summary(3, 1.02, 0.58, 1.47)]
    made = benchmark(tmp_path)
    report = benchmark_report(*SETUP, "c", made, {"cost": summaries, "fixed": summaries})
    gain = "1.02 times as fast with drafts as without"
    assert report.headline == f"cost: {gain}; fixed: {gain}"
    idle = replace(summaries[1], gain=None)
    report = benchmark_report(*SETUP, "c", made, {"cost": [idle]})
    assert (report.headline, row(report, 0)["gain"], report.bars.bars) == ("nothing was drafted", "-", [])
