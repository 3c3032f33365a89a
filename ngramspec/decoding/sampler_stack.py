"""`SamplerStack`: the samplers that one request needs, and the verifier that uses them."""

from __future__ import annotations

from ngramspec.acceptance.rules import TokenDecision
from ngramspec.acceptance.verifier import Acceptance, RuleVerifier, Verifier
from ngramspec.backend import Logits, Vocabulary
from ngramspec.drafting.draft import Draft
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.request import GREEDY, Request
from ngramspec.sampling.distribution import distribution_logprobs, logprobs
from ngramspec.sampling.sampler import BudgetSampler, CloseCalls, RecordingSampler, Sampler, TokenBanSampler
from ngramspec.steps import Step
from ngramspec.tokens import ending_tokens


class SamplerStack:
    """The sampler of a request's settings, wrapped in those that apply its rules and observe its draws.

    A request with a verifier has no samplers. With `counts_calls`, tokens that rounding could have decided are counted.

    Attributes:
        verifier: Verifies the drafts.
        guide: Shapes drafts by the grammar; `None` without a grammar.
        budget: Limits reasoning; `None` without a limit.
        calls: Counts close calls; `None` if they are not counted.
        has_records: Whether `add_records` adds anything to a step.

    Raises:
        ValueError, GrammarError: See `SpeculativeDecoder.generate`.
    """

    def __init__(self, request: Request, vocabulary: Vocabulary, n_vocab: int, *, counts_calls: bool) -> None:
        self._request = request
        self.has_records = counts_calls or request.logprobs is not None or request.return_decisions
        self._decisions: list[TokenDecision] = []  # since the last step
        self.guide: GrammarGuide | None = None
        self.budget: BudgetSampler | None = None
        self.calls: CloseCalls | None = None
        self._recorder: RecordingSampler | None = None
        acceptance = request.acceptance
        if acceptance is not None and not isinstance(acceptance, str | Acceptance):
            if request.sampling is not GREEDY or request.return_decisions:
                raise ValueError("sampling and return_decisions cannot be combined with a verifier, which has its own")
            self.verifier: Verifier = acceptance
            return
        rules = request.rules
        sampler: Sampler = vocabulary.sampler(request.sampling)
        if rules.min_tokens or rules.bad_words:
            too_early = {*ending_tokens(vocabulary), *rules.stop_token_ids} if rules.min_tokens else ()
            sampler = TokenBanSampler(sampler, rules, [token for token in too_early if 0 <= token < n_vocab])
        if rules.reasoning is not None:
            sampler = self.budget = BudgetSampler(sampler, rules.reasoning)
        how = acceptance if isinstance(acceptance, Acceptance) else Acceptance(acceptance)
        how.rule(sampler.sampling, rules.restriction)
        if counts_calls:
            sampler = self.calls = CloseCalls(sampler)
        if request.post_sampling and request.logprobs is not None:
            # Outermost, because counting close calls draws a second time.
            sampler = self._recorder = RecordingSampler(sampler)
        self.verifier = RuleVerifier(sampler, how, self._decisions.append if request.return_decisions else None)
        sampler.begin(request.prompt)
        if sampler.grammar is not None:
            self.guide = GrammarGuide(sampler.grammar)

    def add_records(self, step: Step, rows: Logits, verified_draft: Draft) -> None:
        """Add what the request wants to know about the tokens of a step; `rows` are the logits of its pass."""
        if self.calls is not None:
            step.close_calls = self.calls.take()
        top = self._request.logprobs
        if self._recorder is not None and top is not None:
            pairs = zip(self._recorder.pop_distributions(), step.tokens, strict=False)
            step.logprobs = tuple(distribution_logprobs(p, token, top) for p, token in pairs)
        elif top is not None:
            step.logprobs = tuple(logprobs(row, token, top) for row, token in zip(rows, step.tokens, strict=False))
        if self._request.return_decisions:
            step.verified_draft, step.decisions = verified_draft, tuple(self._decisions)
            self._decisions.clear()
