"""Request to continue a text (`Request`), which all front ends use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ngramspec.acceptance.verifier import Acceptance, Verifier
from ngramspec.backend import Model
from ngramspec.data import PromptError
from ngramspec.sampling.settings import NO_RULES, Sampling, TextRules

GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Request:
    prompt: Sequence[int]  # token ids, at least one, fewer than the context holds
    # Maximum number of tokens to emit; the end of the context may come first. The engine takes 0, which only fills the
    # cache with the prompt.
    max_tokens: int
    sampling: Sampling = GREEDY  # how tokens are chosen
    # How drafts are accepted: settings, the name of a method, or a verifier, which has its own sampling.
    acceptance: str | Acceptance | Verifier | None = None
    # Strings that end the text, which then stops right before them. The name of a control token in one also stands for
    # the token.
    stop: Sequence[str] = ()
    rules: TextRules = NO_RULES  # where the text may end, which words it may not contain, and how long it may reason
    # Token ids of a text that the answer probably copies, such as the file that it changes. It is drafted from first,
    # and a wrong one does not change the text.
    prediction: Sequence[int] = ()
    # Report the log-probabilities of each emitted token and of this many of the most likely tokens; `None`: none.
    logprobs: int | None = None
    post_sampling: bool = False  # report them from the distributions that tokens were drawn from, after all samplers
    return_decisions: bool = False  # report the decision on each token; not available with a verifier
    # Control tokens whose names are part of the text, for callers that parse them. Others have no text, and tokens that
    # end a text stay hidden.
    controls: frozenset[int] = frozenset()
    # The following are for the engine only.
    scored: bool = False  # also report the log-probabilities of the prompt's tokens
    slot: int | None = None  # slot to prefer; `None` means the one that contains most of the prompt
    cache_prompt: bool = True  # whether tokens of the prompt that a slot already contains may be reused
    scales: tuple[float, ...] | None = None  # scales of the LoRA adapters; `None` means those of the engine

    def check(self, model: Model) -> None:
        """Raise a PromptError or a ValueError if a model cannot continue the text."""
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not self.prompt:
            raise PromptError("the prompt is empty")
        if (n_prompt := len(self.prompt)) >= model.n_ctx:
            raise PromptError(
                f"the prompt has {n_prompt} tokens and leaves no room for an answer in the context of {model.n_ctx}"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= model.n_vocab:
            raise ValueError(f"logprobs must be 0 to {model.n_vocab}, the size of the vocabulary, got {self.logprobs}")
