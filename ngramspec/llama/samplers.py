"""`SamplerChain`: llama.cpp's own samplers, in the state that plain decoding would have at this position.

The verifier processes the rows of a batch in order and stops at the first rejection, so one chain is enough for all
rows: it accepts only emitted tokens, and never sees a rejected draft. Random samplers (XTC, mirostat) too draw once per
emitted token, in the order of plain decoding. The chain ends before llama.cpp's last sampler, because the verifier
draws (see `ngramspec.acceptance.rules`).
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from ngramspec import leaves
from ngramspec.data import GrammarError
from ngramspec.llama import bindings
from ngramspec.sampling.distribution import Distribution, point_mass, softmax, top_token
from ngramspec.sampling.rows import CANDIDATE, Candidates
from ngramspec.sampling.settings import Sampling

_MOVING = ("penalties", "dry")
_MANY_BIASES = 1000  # for more, selecting the candidates takes longer than sampling from all tokens


class SamplerChain:
    """The samplers of one sequence, which implement `ngramspec.sampling.sampler.Sampler`."""

    _chain: Any = None  # llama.cpp's handle of the chain

    def __init__(
        self,
        sampling: Sampling,
        n_vocab: int,
        *,
        vocab: Any,  # llama.cpp's handle of the vocabulary; only DRY and infill need it
        n_ctx: int = 0,  # which a look-back of -1 means
        dry_samplers: Callable[..., DrySampler] | None = None,  # cache of them; `None` means that none is kept
        grammar: leaves.Grammar | None = None,  # in its initial state
        suppressed_tokens: Sequence[int] = (),  # ids that the model's file forbids
    ) -> None:
        for token, _ in sampling.logit_bias:
            if not 0 <= token < n_vocab:
                raise ValueError(f"the token of a logit bias must be 0 to {n_vocab - 1}, got {token}")
        self.sampling = sampling
        self.grammar = grammar
        self._n_vocab = n_vocab
        # Biases are applied here, because llama.cpp searches all candidates for each token that is not at its index.
        biases: dict[int, float] = {}
        for token, bias in (*sampling.logit_bias, *((token, -np.inf) for token in suppressed_tokens)):
            biases[token] = biases.get(token, 0.0) + bias
        self._biased_tokens = frozenset(biases)
        self._biases = np.zeros(n_vocab if biases else 0, np.float32)
        self._biases[list(biases)] = list(biases.values())
        penalises = sampling.repeat_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        self._repeat_last_n = window(sampling.repeat_last_n, n_ctx) if penalises else 0
        self._dry_samplers = dry_samplers or partial(DrySampler, vocab)
        self._dry_shape = dry_shape(sampling, n_ctx)
        self._dry_last_n = self._dry_shape[3]
        self._window = max(self._repeat_last_n, self._dry_last_n)
        self._recent: deque[int] = deque()
        self._recent_counts: Counter[int] = Counter()
        active = self._active(vocab)
        self._reach = self._find_reach(active)
        self._chain = self._build(active)
        self._greedy, self._selects, self._seed = sampling.greedy, sampling.samples_internally, sampling.seed
        is_empty = not biases and llama.llama_sampler_chain_n(self._chain) == 0
        self.needs_tokens = grammar is not None or self._window > 0
        self.is_argmax = self._greedy and grammar is None and is_empty
        self._is_top_k = self._reach is not None and not biases and not self._window
        # llama.cpp has a view of the candidates; a sampler that drops the first ones moves the view's pointer.
        self._candidates = Candidates(n_vocab)
        self._start = self._candidates.data.ctypes.data
        data = ctypes.cast(self._start, ctypes.POINTER(llama.llama_token_data))
        self._array = llama.llama_token_data_array(data, 0, -1, False)
        self._array_pointer = ctypes.byref(self._array)
        self._data_pointer = ctypes.c_void_p.from_buffer(self._array)

    def _samplers(self, vocab: Any) -> dict[str, tuple[bool, Callable[[], Any]]]:
        """Return for each sampler by name whether it has an effect here, and llama.cpp's constructor."""
        s = self.sampling
        # Below this temperature, the scaled logits exceed float32; only the best token is likely long before.
        seed, temperature = _seed_32(s.seed), max(s.temperature, 1e-20)
        return {
            "penalties": (
                self._repeat_last_n > 0,
                lambda: bindings.penalties(
                    self._n_vocab, self._repeat_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
                ),
            ),
            "dry": (self._dry_last_n > 0, lambda: self._dry_samplers(*self._dry_shape).copy()),
            "top_n_sigma": (s.top_n_sigma > 0, lambda: llama.llama_sampler_init_top_n_sigma(s.top_n_sigma)),
            "top_k": (s.top_k > 0, lambda: llama.llama_sampler_init_top_k(s.top_k)),
            "typ_p": (s.typical_p < 1, lambda: llama.llama_sampler_init_typical(s.typical_p, 0)),
            "top_p": (s.top_p < 1, lambda: llama.llama_sampler_init_top_p(s.top_p, 0)),
            "min_p": (s.min_p > 0, lambda: llama.llama_sampler_init_min_p(s.min_p, 0)),
            "xtc": (
                s.xtc_probability > 0 and s.xtc_threshold <= 0.5,
                lambda: llama.llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, 0, seed),
            ),
            "temperature": (
                s.temperature != 1 or s.dynatemp_range > 0,
                lambda: llama.llama_sampler_init_temp_ext(temperature, s.dynatemp_range, s.dynatemp_exponent),
            ),
            "infill": (True, lambda: llama.llama_sampler_init_infill(vocab)),
        }

    def _active(self, vocab: Any) -> dict[str, Callable[[], Any]]:
        """Return the constructors of samplers with an effect, in order; if greedy, up to the last that decides."""
        samplers = self._samplers(vocab)
        names = [name for name in self.sampling.samplers if samplers[name][0]]
        if self.sampling.greedy:
            names = names[: names.index("temperature")]
            while names and names[-1] not in (*_MOVING, "infill"):  # which may change the most likely token
                names.pop()
        return {name: samplers[name][1] for name in names}

    def _find_reach(self, active: Iterable[str]) -> int | None:
        """Return how many top logits can affect the draw, except tokens with a penalty or bias; `None` means all."""
        if self.sampling.samples_internally or len(self._biased_tokens) > _MANY_BIASES:
            return None
        for name in active:
            if name == "top_k":
                return self.sampling.top_k
            if name not in _MOVING:
                return None
        return 1 if self.sampling.greedy else None

    def _build(self, active: Mapping[str, Callable[[], Any]]) -> Any:
        s = self.sampling
        params = llama.llama_sampler_chain_default_params()
        params.no_perf = True
        chain = llama.llama_sampler_chain_init(params)
        samplers = []
        if s.samples_internally:
            mirostat_arguments = _seed_32(s.seed), s.mirostat_tau, s.mirostat_eta
            samplers.append(llama.llama_sampler_init_temp(s.temperature))
            if s.mirostat == 1:
                # 100 is llama.cpp's number of tokens to which mirostat 1 fits Zipf's law.
                samplers.append(llama.llama_sampler_init_mirostat(self._n_vocab, *mirostat_arguments, 100))
            else:
                samplers.append(llama.llama_sampler_init_mirostat_v2(*mirostat_arguments))
        else:
            samplers += [make() for make in active.values()]
        for sampler in samplers:
            llama.llama_sampler_chain_add(chain, sampler)
        return chain

    def begin(self, prompt: Sequence[int]) -> None:
        for token in prompt[max(0, len(prompt) - self._window) :]:
            self._look_back_on(token)

    def accept(self, token: int) -> None:
        if self.grammar is not None:
            self.grammar.accept(token)
        if self._window:
            self._look_back_on(token)

    def _look_back_on(self, token: int) -> None:
        llama.llama_sampler_accept(self._chain, token)
        self._recent.append(token)
        self._recent_counts[token] += 1
        if len(self._recent) > self._window:
            oldest = self._recent.popleft()
            self._recent_counts[oldest] -= 1
            if not self._recent_counts[oldest]:
                del self._recent_counts[oldest]

    def draw(self, logits: NDArray[np.float32], position: int, distributions: list[Distribution] | None = None) -> int:
        if self.is_argmax:
            token = top_token(logits)
            if distributions is not None:
                distributions.append(point_mass(token))
            return token
        grammar = None
        while True:
            first, count = self._filter(logits, grammar)
            if distributions is not None:
                distributions.append(self._make_distribution(first, count))
            if self._greedy or self._selects:
                token = self._choose(first, count)
            else:
                token = self._candidates.draw(first, count, self._seed, position, grammar is not None)
            # If the grammar forbids the token, draw another one from those that it allows.
            if grammar is not None or self.grammar is None or self.grammar.allows(token):
                return token
            grammar = self.grammar

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        if self.is_argmax:
            return point_mass(top_token(logits))
        first_draw = self._make_distribution(*self._filter(logits, None))
        legal = self.grammar.mask_allowed(first_draw.ids) if self.grammar is not None else np.True_
        if legal.all():
            return first_draw
        # With probability `missing` the first draw is a forbidden token, and another is drawn under the grammar.
        second_draw = self._make_distribution(*self._filter(logits, self.grammar))
        missing = float(first_draw.probs[~legal].sum())
        ids = np.union1d(first_draw.ids[legal], second_draw.ids)
        probs = np.zeros(ids.size)
        probs[np.searchsorted(ids, first_draw.ids[legal])] = first_draw.probs[legal]
        probs[np.searchsorted(ids, second_draw.ids)] += missing * second_draw.probs
        return Distribution(ids, probs, np.log(probs))

    def _make_distribution(self, first: int, count: int) -> Distribution:
        """Return the distribution of the candidates that the chain kept."""
        token = self._choose(first, count)
        if self._greedy or self._selects:
            return point_mass(token)
        candidates = self._candidates.data[first : first + count]
        return softmax(candidates["id"], candidates["logit"])

    def _choose(self, first: int, count: int) -> int:
        """Return the candidate that the chain selected, otherwise the most likely one."""
        token = self._candidates.best(first, count)
        return int(self._candidates.data["id"][first + self._array.selected]) if self._selects else token

    def _filter(self, logits: NDArray[np.float32], grammar: leaves.Grammar | None) -> tuple[int, int]:
        """Apply the chain to the allowed logits, and return the first index and the number of those that it kept."""
        array = self._array
        if grammar is None and self._is_top_k:
            array.size = self._candidates.take_largest(logits, self._reach)
        else:
            array.size = self._gather(logits, grammar)
        array.selected, array.sorted = -1, False
        self._data_pointer.value = self._start
        llama.llama_sampler_apply(self._chain, self._array_pointer)
        return (self._data_pointer.value - self._start) // CANDIDATE.itemsize, array.size

    def _gather(self, logits: NDArray[np.float32], grammar: leaves.Grammar | None) -> int:
        """Collect the candidates for the chain, all tokens or only those that it can keep; return their number.

        If top-k comes first, the candidates are all tokens with a penalty or bias, and the k largest logits among the
        others. The k largest logits after penalties and biases are among these. With a grammar, k allowed tokens
        without a penalty or bias are included.
        """
        if self._reach is None:
            return self._change(self._candidates.take_all(logits), logits, grammar)
        moved_tokens = np.array(sorted(self._biased_tokens.union(self._recent_counts)), np.int32)
        n_largest = self._reach + moved_tokens.size
        while True:
            count = self._candidates.take_largest(logits, n_largest)
            count = self._candidates.move_to_end(count, moved_tokens, logits)
            count = self._change(count, logits, grammar)
            if grammar is None or n_largest >= logits.size:
                return count
            if np.isin(self._candidates.data["id"][:count], moved_tokens, invert=True).sum() >= self._reach:
                return count
            n_largest *= 8

    def _change(self, count: int, logits: NDArray[np.float32], grammar: leaves.Grammar | None) -> int:
        """Add the biases to the candidates, and keep those that the grammar allows."""
        candidates = self._candidates.data[:count]
        if grammar is not None:
            is_allowed = grammar.mask_allowed(candidates["id"]) & (candidates["logit"] > -np.inf)
            if not is_allowed.any() and count >= logits.size:
                raise GrammarError("dead end in the grammar: it allows none of the model's tokens here")
            legal = candidates[is_allowed]
            candidates = candidates[: legal.size]
            candidates[:] = legal
        if self._biased_tokens:
            candidates["logit"] += self._biases[candidates["id"]]
        return candidates.size

    def __del__(self) -> None:
        if self._chain is not None:
            llama.llama_sampler_free(self._chain)
            self._chain = None


def _seed_32(seed: int) -> int:
    """Fold a seed to llama.cpp's 32 bits, except the highest value, which requests a random seed."""
    result = (seed ^ (seed >> 32)) & 0xFFFFFFFF
    return result if result != 0xFFFFFFFF else 0


def window(last_n: int, n_ctx: int) -> int:
    """Return a number of recent tokens, at most the context: llama.cpp reserves memory for all of them."""
    return n_ctx if last_n < 0 else min(last_n, n_ctx) if n_ctx else last_n


def dry_shape(sampling: Sampling, n_ctx: int) -> tuple[float, float, int, int, tuple[str, ...]]:
    """Return the settings of a `DrySampler`; the last number counts the recent tokens, and 0 means no effect."""
    last_n = window(sampling.dry_penalty_last_n, n_ctx) if sampling.dry_multiplier > 0 else 0
    breakers = tuple(dict.fromkeys(sampling.dry_sequence_breakers))
    return sampling.dry_multiplier, sampling.dry_base, sampling.dry_allowed_length, last_n, breakers


class DrySampler:
    """One of llama.cpp's DRY samplers at the start of a text, of which copies are cheap.

    Creating one takes milliseconds per sequence breaker, which llama.cpp compares with all tokens of the vocabulary.
    """

    _handle: Any = None  # as long as the constructor has not made one

    def __init__(
        self, vocab: Any, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: Sequence[str]
    ) -> None:
        array = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
        self._handle = bindings.dry(vocab, multiplier, base, allowed_length, last_n, array)

    def copy(self) -> Any:
        """Return a sampler that the caller frees."""
        return llama.llama_sampler_clone(self._handle)

    def __del__(self) -> None:
        if self._handle is not None:
            llama.llama_sampler_free(self._handle)
