"""The smallest drafting loop: a verifier on the mock target, without decoder, drafter and policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from support.mock_target import MockTarget

from ngramspec.acceptance.verifier import Acceptance, RuleVerifier
from ngramspec.drafting.draft import Chooser, Draft
from ngramspec.sampling.settings import Sampling

Propose = Callable[[list[int], Chooser | None], Draft]
"""(all tokens, function that picks tokens) -> a draft."""


def make_certain_draft(tokens: Sequence[int]) -> Draft:
    """Return a draft that was not sampled: q is 1 at each token."""
    return Draft(tuple(tokens), tuple({t: 1.0} for t in tokens))


def make_count_drafter(counts: Sequence[dict[int, int]]) -> Propose:
    """Return a drafter that picks tokens from tables without context: with `choose`, or the most likely token."""

    def propose(_tokens: list[int], choose: Chooser | None) -> Draft:
        tokens = [choose(i, c) if choose is not None else max(c, key=c.__getitem__) for i, c in enumerate(counts)]
        q = [{t: c / sum(weights.values()) for t, c in weights.items()} for weights in counts]
        return Draft(tuple(tokens), tuple(q) if choose is not None else ())

    return propose


def speculate(
    mock: MockTarget,
    prompt: Sequence[int],
    n: int,
    sampling: Sampling,
    propose: Propose,
    acceptance: Acceptance | str | None = None,
) -> tuple[list[int], list[int]]:
    """Return at most n tokens, and the number of draft tokens that each pass accepted."""
    sampler = mock.sampler(sampling)
    sampler.begin(prompt)
    verifier = RuleVerifier(sampler, acceptance)
    mock.prefill(prompt[:-1])
    tokens, n_accepted = list(prompt), list[int]()
    while len(tokens) < len(prompt) + n and not (n_accepted and mock.is_eog(tokens[-1])):
        draft = propose(tokens, verifier.choose(len(tokens)))
        draft = draft.head(next((i for i, t in enumerate(draft.tokens, 1) if mock.is_eog(t)), len(draft)))
        rows = mock.evaluate([tokens[-1], *draft.tokens])
        verdict = verifier.verify(rows, draft, len(tokens))
        n_accepted.append(verdict.accepted)
        assert verdict.tokens[: verdict.accepted] == draft.tokens[: verdict.accepted]
        tokens.extend(verdict.tokens)
        ends = (i for i, t in enumerate(tokens) if i >= len(prompt) and mock.is_eog(t))
        del tokens[next(ends, len(tokens)) + 1 :]
        mock.rollback(len(tokens) - 1)
    return tokens[len(prompt) : len(prompt) + n], n_accepted
