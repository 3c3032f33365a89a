"""Rules of one text (`TextRules`): its minimum length, tokens that end it, forbidden words and a reasoning budget.

They depend on the tokens before, so no logit bias can express them. A field that is declared with `option` is an option
of `complete` and `chat`, a setting of `/set`, a field of every HTTP API, and one of Ollama's `options`, without further
code; `complete --beams` rejects it. `ngramspec.decoding.sampler_stack` applies the rules to tokens.
`ngramspec.decoding.text` ends the text at a token, and `ngramspec.decoding.stream` at a string.

Other rules are `ngramspec.acceptance.rules` (which draft tokens are accepted) and those of grammars.
"""

from __future__ import annotations

from dataclasses import dataclass

from ngramspec.sampling.option import allow_range, option
from ngramspec.sampling.reasoning_budget import ReasoningBudget


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules of one text, in addition to the limit and the stop strings of its `Request`.

    Rules that vLLM also has are named like its fields. A whole number declared with `option` needs no reader.
    """

    # Minimum number of tokens before the text may end, by a token or a stop string. Limits have priority: `max_tokens`,
    # the context, and those of the server's text readers.
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
