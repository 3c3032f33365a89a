"""`SamplerChain`: llama.cpp's own samplers, in the state that plain decoding would have at this position.

The verifier goes through the rows of a batch in order and stops at the first refusal, so one chain is enough for all
rows: it sees a row only when every token before that row is settled, and it accepts emitted tokens only. A refused
draft leaves no trace because the chain never saw it. That holds for random samplers (XTC, mirostat) too, which
draw once per emitted token, in the order of plain decoding.

The chain ends before llama.cpp's last sampler, the draw: that is the verifier's (see `ngramspec.acceptance.rules`).
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from ngramspec.errors import GrammarError
from ngramspec.llama import bindings
from ngramspec.llama.dry_samplers import DrySamplers, dry_window, window
from ngramspec.llama.grammar import Grammar
from ngramspec.sampling.distribution import (
    BadLogits,
    Distribution,
    NoTokenLeft,
    largest,
    point_mass,
    softmax,
    top_token,
)
from ngramspec.sampling.sampler import Draw
from ngramspec.sampling.settings import Sampling

CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # llama.cpp's `llama_token_data`
_LEAST_TEMPERATURE = 1e-20  # below it the scaled logits leave float32; nothing but the best has a chance long before
_MOVING = ("penalties", "dry")
_DECIDING = (*_MOVING, "infill")  # after which another token may be the most likely
_MANY_BIASES = 1000  # for more, selecting the candidates takes longer than sampling from all tokens
_MIROSTAT_M = 100  # tokens that mirostat 1 fits Zipf's law to; llama.cpp's constant


class SamplerChain:
    """See `ngramspec.sampling.sampler.Sampler`.

    Args:
        vocab: llama.cpp's handle of the vocabulary; only DRY and infill need it.
        n_ctx: what a look-back of -1 means.
        dry_samplers: The DRY samplers of the vocabulary; `None` means that they are made for this chain only.
        grammar: at its start.
        suppressed: token ids that the model's file forbids.
    """

    def __init__(
        self,
        sampling: Sampling,
        n_vocab: int,
        *,
        vocab: Any,
        n_ctx: int = 0,
        dry_samplers: DrySamplers | None = None,
        grammar: Grammar | None = None,
        suppressed: Sequence[int] = (),
    ) -> None:
        for token, _ in sampling.logit_bias:
            if not 0 <= token < n_vocab:
                raise ValueError(f"the token of a logit bias must be 0 to {n_vocab - 1}, got {token}")
        self.sampling = sampling
        self.grammar = grammar
        self._n_vocab = n_vocab
        # They are not left to llama.cpp, which searches all candidates for each token that is not at its place.
        biases: dict[int, float] = {}
        for token, bias in (*sampling.logit_bias, *((token, -np.inf) for token in suppressed)):
            biases[token] = biases.get(token, 0.0) + bias
        self._biased = np.array(sorted(biases), np.int32)
        self._biases = np.zeros(n_vocab if biases else 0, np.float32)
        self._biases[self._biased] = [biases[token] for token in self._biased.tolist()]
        penalises = sampling.repeat_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        self._repeat_last_n = window(sampling.repeat_last_n, n_ctx) if penalises else 0
        self._dry_samplers = dry_samplers or DrySamplers(vocab)
        self._dry_last_n, self._n_ctx = dry_window(sampling, n_ctx), n_ctx
        self._window = max(self._repeat_last_n, self._dry_last_n)
        self._recent: deque[int] = deque()
        self._recent_counts: Counter[int] = Counter()
        active = self._active(vocab)
        self._reach = self._find_reach(active)
        self._chain = self._build(active)
        is_empty = not biases and llama.llama_sampler_chain_n(self._chain) == 0
        self._bare = sampling.greedy and grammar is None and is_empty

    # ------------------------------------------------------------------ building

    def _samplers(self, vocab: Any) -> dict[str, tuple[bool, Callable[[], Any]]]:
        """By name: whether a sampler does something here, and llama.cpp's constructor of it."""
        s = self.sampling
        seed, temperature = _seed_32(s.seed), max(s.temperature, _LEAST_TEMPERATURE)
        return {
            "penalties": (
                self._repeat_last_n > 0,
                lambda: bindings.penalties(
                    llama, self._n_vocab, self._repeat_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
                ),
            ),
            "dry": (self._dry_last_n > 0, lambda: self._dry_samplers.make(s, self._n_ctx)),
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
        """Constructors of the samplers that do something, in order; if greedy, up to the last that decides."""
        made = self._samplers(vocab)
        names = [name for name in self.sampling.samplers if made[name][0]]
        if self.sampling.greedy:
            names = names[: names.index("temperature")]
            while names and names[-1] not in _DECIDING:
                names.pop()
        return {name: made[name][1] for name in names}

    def _find_reach(self, active: Iterable[str]) -> int | None:
        """How many top logits can affect the draw, not counting tokens that a penalty or bias moves; None: all."""
        if self.sampling.selects or self._biased.size > _MANY_BIASES:
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
        if s.selects:
            law = _seed_32(s.seed), s.mirostat_tau, s.mirostat_eta
            samplers.append(llama.llama_sampler_init_temp(s.temperature))
            if s.mirostat == 1:
                samplers.append(llama.llama_sampler_init_mirostat(self._n_vocab, *law, _MIROSTAT_M))
            else:
                samplers.append(llama.llama_sampler_init_mirostat_v2(*law))
        else:
            samplers += [make() for make in active.values()]
        for sampler in samplers:
            llama.llama_sampler_chain_add(chain, sampler)
        return chain

    # ------------------------------------------------------------------ one text

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
            gone = self._recent.popleft()
            self._recent_counts[gone] -= 1
            if not self._recent_counts[gone]:
                del self._recent_counts[gone]

    # ------------------------------------------------------------------ one position

    def draw(self, logits: NDArray[np.float32], pick: Draw) -> int:
        if self._bare:
            return top_token(logits)
        token = pick(self._law(logits, None), 0)
        if self.grammar is None or self.grammar.allows(token):
            return token
        return pick(self._law(logits, self.grammar), 1)

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        if self._bare:
            return point_mass(top_token(logits))
        law = self._law(logits, None)
        legal = self.grammar.allowed(law.ids) if self.grammar is not None else np.True_
        if legal.all():
            return law
        # With probability `missing` the first draw is a forbidden token, and another is drawn under the grammar.
        again = self._law(logits, self.grammar)
        missing = float(law.probs[~legal].sum())
        ids = np.union1d(law.ids[legal], again.ids)
        probs = np.zeros(ids.size)
        probs[np.searchsorted(ids, law.ids[legal])] = law.probs[legal]
        probs[np.searchsorted(ids, again.ids)] += missing * again.probs
        return Distribution(ids, probs, np.log(probs))

    def _law(self, logits: NDArray[np.float32], grammar: Grammar | None) -> Distribution:
        """The law that the chain makes of these logits, of those tokens alone that `grammar` allows."""
        candidates = self._candidates(logits, grammar)
        start = candidates.ctypes.data
        data = ctypes.cast(start, ctypes.POINTER(llama.llama_token_data))
        array = llama.llama_token_data_array(data=data, size=candidates.size, selected=-1, sorted=False)
        llama.llama_sampler_apply(self._chain, ctypes.byref(array))
        # A sampler that drops the first ones moves the pointer.
        first = (ctypes.addressof(array.data.contents) - start) // CANDIDATE.itemsize
        left = candidates[first : first + array.size]
        ids, scores = left["id"], left["logit"]
        if not np.isfinite(scores.max()):
            raise NoTokenLeft("no token is left to sample: the sampling settings move all logits out of range")
        if self.sampling.selects:
            return point_mass(int(ids[array.selected]))
        if self.sampling.greedy:
            return point_mass(int(ids[scores == scores.max()].min()))
        return softmax(ids, scores)

    def _candidates(self, logits: NDArray[np.float32], grammar: Grammar | None) -> NDArray[np.void]:
        """The tokens that the chain is shown: all of them, or only those that can come through it.

        If top-k comes first, these are the k largest logits among the tokens that no penalty or bias moves, and all
        tokens that one does move: the k largest logits after the move are among them. With a grammar: k allowed
        ones.
        """
        if self._reach is None:
            return self._gather(logits, np.arange(logits.size, dtype=np.int32), grammar)
        moved = np.union1d(np.fromiter(self._recent_counts, np.int32), self._biased)
        count = self._reach + moved.size
        while True:
            ids = largest(logits, count).astype(np.int32)
            unmoved = ids if not moved.size else ids[~np.isin(ids, moved, assume_unique=True)]
            candidates = self._gather(logits, np.concatenate((unmoved, moved)), grammar)
            if grammar is None or count >= logits.size:
                return candidates
            if np.isin(candidates["id"], moved, invert=True).sum() >= self._reach:
                return candidates
            count *= 8

    def _gather(self, logits: NDArray[np.float32], ids: NDArray[np.int32], grammar: Grammar | None) -> NDArray[np.void]:
        candidates = np.empty(ids.size, CANDIDATE)
        candidates["id"] = ids
        values = logits[ids]
        if not np.isfinite(values.max()):
            top_token(logits)  # tells what is wrong
            raise BadLogits("no token is left to sample: all logits are -inf")
        candidates["logit"] = values + self._biases[ids] if self._biased.size else values
        candidates["p"] = 0
        if grammar is None:
            return candidates
        candidates = candidates[grammar.allowed(ids) & (values > -np.inf)]
        if not candidates.size and ids.size >= logits.size:
            raise GrammarError("dead end in the grammar: it allows none of the model's tokens here")
        return candidates

    def __del__(self) -> None:
        if getattr(self, "_chain", None):
            llama.llama_sampler_free(self._chain)
            self._chain = None


def _seed_32(seed: int) -> int:
    """llama.cpp's seeds have 32 bits, of which the highest value asks for a random one."""
    folded = (seed ^ (seed >> 32)) & 0xFFFFFFFF
    return folded if folded != 0xFFFFFFFF else 0
