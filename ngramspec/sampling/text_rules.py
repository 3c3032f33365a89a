"""Rules of one text (`TextRules`): its minimum length, tokens that end it, forbidden words and a reasoning budget.

They depend on the tokens before, so no logit bias can express them. A field that is declared with `option` is an option
of `complete` and `chat`, a setting of `/set`, a field of every HTTP API, and one of Ollama's `options`, without further
code. `ngramspec.decoding.sampler_stack` applies the rules, and `ngramspec.decoding.text` ends the text.

Other rules are `ngramspec.acceptance.rules` (which draft tokens are accepted) and those of grammars.
"""

from __future__ import annotations

from dataclasses import dataclass

from ngramspec.sampling.option import allow_range, option
from ngramspec.sampling.reasoning_budget import ReasoningBudget


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules of one text, with the names of vLLM's fields. A whole number declared with `option` needs no reader."""

    # Minimum number of tokens before the text may end, by a token or a stop string. `max_tokens` has priority.
    min_tokens: int = option(
        0,
        metavar="N",
        help="Minimum number of tokens before the text may end; stop strings within them do not count; 0: off.",
        allowed=allow_range(0),
    )
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end the text, in addition to those of the vocabulary
    bad_words: tuple[tuple[int, ...], ...] = ()  # forbidden sequences of token ids, of two or more tokens each
    reasoning: ReasoningBudget | None = None  # budget of reasoning; `None` means no limit

    @property
    def restriction(self) -> str:
        """Name of a rule that forbids or forces tokens; empty without one. `stop_token_ids` does neither."""
        if self.reasoning is not None:
            return "a reasoning budget"
        return "min_tokens" if self.min_tokens else "bad_words" if self.bad_words else ""


NO_RULES = TextRules()
