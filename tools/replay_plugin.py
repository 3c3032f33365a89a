"""ngramspec's drafting for replay harnesses that drive drafters themselves: class `Ours`.

    start(prompt_ids)      a new request
    accept(tokens)         newly emitted tokens; the first call of a request is the prefill's token
    draft() -> list[int]   tokens to send after the last token; -1 pads the batch to a size that costs less

The class uses the decoding loop, `ngramspec.decoding.loop`, with the default drafter and the cost policy. The cost
curve gives the time of each pass. `ngramspec replay` gives the same counts if it evaluates no branches in addition to
the draft, because harnesses return no logits for branches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ngramspec.cost.fixed_curves import CURVES, parse_curve
from ngramspec.cost.times import LARGEST
from ngramspec.decoding.loop import DecodingLoop, Pass
from ngramspec.decoding.text import DraftedText, Drafts, Plan
from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.instruments.replay.replay import RecordedTarget
from ngramspec.policies import make_policy
from ngramspec.steps import Step
from ngramspec.tokens import common_prefix

PADDING = -1
"""Placeholder in place of a token: the harness rejects it and includes it in the batch size."""

UNKNOWN_END = 1 << 30


class Ours:
    """Drafter for many consecutive requests that learns from each of them.

    Args:
        curve: Cost of a pass by its number of tokens, {"1": 1.0, "8": 2.5}; `None` means the flat curve.
        memory: True to draft from the answers of earlier requests.
    """

    def __init__(self, curve: Mapping[str, float] | None = None, memory: bool = False) -> None:
        points = CURVES["flat"][0] if curve is None else curve
        self._curve = parse_curve({str(n): cost for n, cost in points.items()})
        target = RecordedTarget(self._curve)
        self._text = DraftedText(Drafts(make_drafter(DEFAULT, memory=memory)), target)
        self._text.tokens_left = UNKNOWN_END
        self._loop = DecodingLoop(make_policy("cost"), target.clock)
        self._loop.prepare(self._curve, range(1, LARGEST + 1))
        self._plan: Plan | None = None
        self._last = 1  # size of the last pass

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a request."""
        self._loop.policy.begin()
        self._text.drafts.begin(prompt_ids)
        self._plan = None

    def draft(self) -> list[int]:
        """Return the draft, padded to the batch size that the policy chose."""
        self._plan = self._loop.plan(self._text, 0)
        self._has_proposal = self._text.drafts.proposal is not None
        tokens = list(self._plan.draft.tokens)
        return tokens + [PADDING] * (self._plan.size - 1 - len(tokens))

    def accept(self, tokens: Sequence[int]) -> None:
        """Learn from the emitted tokens."""
        if self._plan is None:
            self._text.drafts.first(tokens[0])
            return
        draft, size = self._plan.draft.tokens, self._plan.size
        n_accepted = common_prefix(draft, tokens)
        seconds = self._curve.ratio(size) + (self._curve.change if size != self._last else 0)
        self._last = size
        current = Pass((self._text,), (self._plan,), size, 0, self._has_proposal, seconds=seconds)
        self._loop.finish(current, Step(tuple(tokens), drafted=draft, accepted=n_accepted))
