"""llama.cpp's sampler chain on all candidates, as its `common/sampling.cpp` builds and uses it, as a reference."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
from numpy.typing import NDArray
from support.model_files import END

from ngramspec.llama import bindings
from ngramspec.llama.samplers import SamplerChain
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.distribution import Distribution
from ngramspec.sampling.settings import SAMPLERS, Sampling

OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PENALTIES: dict[str, Any] = {"repeat_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5, "min_p": 0.0},
    "top-k 1": {"top_k": 1},
    "top-k 5": {"top_k": 5, "top_p": 0.7, "min_p": 0.0},
    "top-k 200": {"top_k": 200, "top_p": 0.99, "min_p": 0.001},
    "top-k beyond": {"top_k": 10**6, "top_p": 0.3, "min_p": 0.0},
    "no top-k": {"top_k": 0},
    "top-p": {**OPEN, "top_p": 0.6},
    "min-p": {**OPEN, "min_p": 0.2},
    "min-p 1": {"top_p": 1.0, "min_p": 1.0},
    "open": OPEN,
    "typical": {"typical_p": 0.7},
    "typical alone": {**OPEN, "typical_p": 0.4},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "top-n-sigma alone": {**OPEN, "top_n_sigma": 2.0},
    "penalties": PENALTIES,
    "penalties, short": {**PENALTIES, "repeat_last_n": 5},
    "penalties, whole": {**PENALTIES, "repeat_last_n": -1},
    "penalties off": {**PENALTIES, "repeat_last_n": 0},
    "penalties, no top-k": {**PENALTIES, "top_k": 0},
    "rewards": {"repeat_penalty": 0.7, "presence_penalty": -1.0, "frequency_penalty": -0.5},
    "dry": {"dry_multiplier": 0.8},
    "dry, harsh": {"dry_multiplier": 2.0, "dry_base": 1.2, "dry_allowed_length": 1, "dry_penalty_last_n": -1},
    "dry, short": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_penalty_last_n": 12, **PENALTIES},
    "dry, no breakers": {"dry_multiplier": 2.0, "dry_sequence_breakers": (), "dry_allowed_length": 0},
    "xtc": {"xtc_probability": 0.5, "temperature": 1.5},
    "xtc always": {"xtc_probability": 1.0, "xtc_threshold": 0.02, "temperature": 1.0},
    "xtc at its end": {"xtc_probability": 1.0, "xtc_threshold": 0.5, "temperature": 1.0},
    "xtc never": {"xtc_probability": 1.0, "xtc_threshold": 0.51},
    "xtc at 0": {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    "dynatemp": {"dynatemp_range": 0.5},
    "dynatemp bent": {"dynatemp_range": 2.0, "dynatemp_exponent": 0.3, "min_p": 0.0},
    "dynatemp from 0": {"temperature": 0.0, "dynatemp_range": 1.5},
    "biases": {"logit_bias": ((3, 5.0), (5, -math.inf), (0, -2.0), (6, 1.0))},
    "biases, no top-k": {"logit_bias": ((3, 5.0), (5, -math.inf), (0, -2.0)), "top_k": 0},
    "all of it": {
        **PENALTIES,
        "dry_multiplier": 0.5,
        "dry_allowed_length": 1,
        "typical_p": 0.95,
        "xtc_probability": 0.3,
        "xtc_threshold": 0.05,
        "dynatemp_range": 0.3,
        "top_n_sigma": 3.0,
        "logit_bias": ((2, 3.0), (4, -1.0)),
    },
    "greedy": {"temperature": 0.0},
    "greedy, penalties": {"temperature": 0.0, **PENALTIES},
    "greedy, biases": {"temperature": 0.0, "logit_bias": ((3, 5.0), (5, -math.inf))},
    "greedy, dry": {"temperature": 0.0, "dry_multiplier": 3.0, "dry_allowed_length": 1},
    "backwards": {"samplers": tuple(reversed(SAMPLERS)), **PENALTIES, "top_k": 20},
    "temperature first": {"samplers": ("temperature", "top_k", "top_p", "min_p"), "temperature": 0.6},
    "penalties last": {"samplers": ("top_k", "temperature", "penalties"), **PENALTIES},
    "no samplers": {"samplers": (), "temperature": 1.0},
}
"""Settings by name, in addition to temperature 0.8 and seed 5."""

INFILL: dict[str, dict[str, Any]] = {
    "infill": {"samplers": ("top_k", "top_p", "infill"), "temperature": 1.0, "top_p": 0.9},
    "infill, wide": {"samplers": ("top_k", "infill", "temperature"), "top_k": 200},
    "infill first": {"samplers": ("penalties", "top_k", "infill", "min_p"), "temperature": 1.0, **PENALTIES},
    "infill last": {"samplers": ("top_p", "temperature", "top_k", "infill"), "top_k": 7},
    "greedy, infill": {"samplers": ("top_k", "top_p", "infill", "temperature"), "temperature": 0.0},
}
"""Settings for the sampler that reads the text of the vocabulary's tokens."""

FIRST_BYTE = 3  # token of the byte 0 in the word vocabulary
CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class LlamaChain:
    """`common_sampler` of one text; DRY and grammars need `vocab`, llama.cpp's handle of the vocabulary."""

    def __init__(self, s: Sampling, n_vocab: int, *, vocab: Any = None, n_ctx: int = 0) -> None:
        self._chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        self._grammar = llama.llama_sampler_init_grammar(vocab, s.grammar.encode(), b"root") if s.grammar else None
        self.has_grammar = bool(self._grammar)
        self.selects = bool(s.mirostat)
        seed = s.seed
        assert seed < 2**32 - 1
        if s.logit_bias:
            biases = (llama.llama_logit_bias * len(s.logit_bias))(*s.logit_bias)
            self._add(llama.llama_sampler_init_logit_bias(n_vocab, len(s.logit_bias), biases))
        if s.mirostat:
            self._add(llama.llama_sampler_init_temp(s.temperature))
            version_1 = llama.llama_sampler_init_mirostat(n_vocab, seed, s.mirostat_tau, s.mirostat_eta, 100)
            version_2 = llama.llama_sampler_init_mirostat_v2(seed, s.mirostat_tau, s.mirostat_eta)
            self._add(version_1 if s.mirostat == 1 else version_2)
            return
        breakers = (ctypes.c_char_p * len(s.dry_sequence_breakers))(*(b.encode() for b in s.dry_sequence_breakers))
        last_n = n_ctx if s.repeat_last_n < 0 else s.repeat_last_n
        dry_last_n = n_ctx if s.dry_penalty_last_n < 0 else s.dry_penalty_last_n
        make = {
            "penalties": lambda: bindings.penalties(
                n_vocab, last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
            ),
            "dry": lambda: bindings.dry(
                vocab, s.dry_multiplier, s.dry_base, s.dry_allowed_length, dry_last_n, breakers
            ),
            "top_n_sigma": lambda: llama.llama_sampler_init_top_n_sigma(s.top_n_sigma),
            "top_k": lambda: llama.llama_sampler_init_top_k(s.top_k),
            "typ_p": lambda: llama.llama_sampler_init_typical(s.typical_p, 0),
            "top_p": lambda: llama.llama_sampler_init_top_p(s.top_p, 0),
            "min_p": lambda: llama.llama_sampler_init_min_p(s.min_p, 0),
            "xtc": lambda: llama.llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, 0, seed),
            "temperature": lambda: llama.llama_sampler_init_temp_ext(
                s.temperature, s.dynatemp_range, s.dynatemp_exponent
            ),
            "infill": lambda: llama.llama_sampler_init_infill(vocab),
        }
        for name in s.samplers:
            self._add(make[name]())
        self._add(llama.llama_sampler_init_dist(1))

    def _add(self, sampler: Any) -> None:
        llama.llama_sampler_chain_add(self._chain, sampler)

    def begin(self, prompt: Sequence[int]) -> None:
        """Accept the prompt for the penalties, but not for the grammar."""
        for token in prompt:
            llama.llama_sampler_accept(self._chain, token)

    def accept(self, token: int) -> None:
        if self._grammar:
            llama.llama_sampler_accept(self._grammar, token)
        llama.llama_sampler_accept(self._chain, token)

    def probabilities(self, logits: NDArray[np.float32], *, grammar: bool = False) -> dict[int, float]:
        """Return the probabilities that the chain leaves of all tokens, or of those that the grammar allows.

        With mirostat, return only the token it selects.
        """
        data = np.zeros(logits.size, CANDIDATE)
        data["id"], data["logit"] = np.arange(logits.size), logits
        array = llama.llama_token_data_array(_pointer(data), data.size, -1, False)
        if grammar:
            llama.llama_sampler_apply(self._grammar, ctypes.byref(array))
        llama.llama_sampler_apply(self._chain, ctypes.byref(array))
        first = (ctypes.addressof(array.data.contents) - data.ctypes.data) // CANDIDATE.itemsize
        candidates = data[first : first + array.size]
        if self.selects:
            return {int(candidates["id"][array.selected]): 1.0}
        return dict(zip(candidates["id"].tolist(), candidates["p"].tolist(), strict=True))

    def allows(self, token: int) -> bool:
        data = np.array([(token, 1.0, 0.0)], CANDIDATE)
        array = llama.llama_token_data_array(_pointer(data), 1, -1, False)
        llama.llama_sampler_apply(self._grammar, ctypes.byref(array))
        return bool(data["logit"][0] > -np.inf)

    def __del__(self) -> None:
        llama.llama_sampler_free(self._chain)
        if self._grammar:
            llama.llama_sampler_free(self._grammar)


def _pointer(data: NDArray[np.void]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(llama.llama_token_data))


def read_with_llama(vocabulary: Vocabulary, text: str, raw: bytes) -> tuple[int, bool] | None:
    """Return how many bytes a grammar in GBNF allows, and whether the text may end after all of them.

    The tokens are those of the word vocabulary. `None` means that llama.cpp considers the grammar as left-recursive.
    """
    chain = LlamaChain(Sampling(grammar=text), vocabulary.n_vocab, vocab=vocabulary._vocab)
    if not chain.has_grammar:
        return None
    count = 0
    while count < len(raw) and chain.allows(FIRST_BYTE + raw[count]):
        chain.accept(FIRST_BYTE + raw[count])
        count += 1
    return count, count == len(raw) and chain.allows(END)


def make_chains(
    vocabulary: Vocabulary, s: Sampling, n_vocab: int, n_ctx: int = 4096
) -> tuple[SamplerChain, LlamaChain]:
    vocab = vocabulary._vocab
    ours = SamplerChain(s, n_vocab, vocab=vocab, n_ctx=n_ctx)
    return ours, LlamaChain(s, n_vocab, vocab=vocab, n_ctx=n_ctx)


def make_chain(sampling: Sampling, n_vocab: int) -> SamplerChain:
    """Return the samplers of a `Sampling`, without a vocabulary and therefore without DRY and grammars."""
    return SamplerChain(sampling, n_vocab, vocab=None)


def check_distribution(p: Distribution) -> None:
    assert p.ids.dtype == np.int32
    assert (np.diff(p.ids) > 0).all()
    assert (p.probs > 0).all()
    assert abs(p.probs.sum() - 1) < 1e-12
    np.testing.assert_allclose(np.exp(p.logp), p.probs, rtol=1e-10)


def compare(p: Distribution, theirs: dict[int, float]) -> None:
    """Check that two distributions are equal except below 1e-30, where float32 probabilities lose digits and vanish."""
    check_distribution(p)
    ours = dict(zip(p.ids.tolist(), p.probs.tolist(), strict=True))
    assert {t for t, prob in theirs.items() if prob > 1e-30} == {t for t, prob in ours.items() if prob > 1e-30}
    assert max(abs(ours[token] - prob) for token, prob in theirs.items() if prob > 1e-30) < 1e-5


def random_logits(rng: np.random.Generator, i: int, n_vocab: int) -> NDArray[np.float32]:
    logits = ((0.3, 1.0, 3.0, 8.0)[i % 4] * rng.standard_normal(n_vocab)).astype(np.float32)
    if i % 3 == 0:
        logits[rng.integers(n_vocab)] += 6  # a peak
    return logits


def random_text(rng: np.random.Generator, length: int, n_vocab: int) -> list[int]:
    """Return a text that repeats itself and contains line ends."""
    text: list[int] = rng.integers(0, min(n_vocab, 9), length).tolist()
    span = text[length // 3 : length // 3 + 8]
    return [*text, *span, *span[:4]]
