"""`LlamaDraftModel` in the hands of llama-cpp-python's own `Llama`."""

from __future__ import annotations

from itertools import islice

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel as DraftModel
from support.cli_runner import DEMO

import ngramspec
from ngramspec.llama.borrowed import mend

REPEATING = "one two three four five six seven eight nine ten " * 6


def test_it_drafts_what_repeats_and_nothing_else() -> None:
    drafts = ngramspec.LlamaDraftModel(num_pred_tokens=4)
    assert isinstance(drafts, DraftModel)
    text = [*range(50, 80), *range(50, 60)]
    first = drafts(np.array(text, np.intc))
    assert first.tolist() == [60, 61, 62, 63]
    assert first.dtype == np.intc
    assert drafts(np.array([*text, 60, 61], np.intc)).tolist() == [62, 63, 64, 65]
    assert drafts(np.array([1, 2, 3], np.intc)).size == 0
    assert drafts(np.array(text, np.intc)).tolist() == [60, 61, 62, 63]


def test_the_parent_s_text_stays_the_same() -> None:
    settings = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "logits_all": True}
    mend(0)
    plain = llama_cpp.Llama(str(DEMO), **settings)
    drafted = llama_cpp.Llama(str(DEMO), draft_model=ngramspec.LlamaDraftModel(), **settings)
    prompt = plain.tokenize(REPEATING.encode())
    assert list(islice(drafted.generate(prompt, temp=0.0), 80)) == list(islice(plain.generate(prompt, temp=0.0), 80))
    plain.close()
    drafted.close()
