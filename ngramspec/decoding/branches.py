"""Questions beside a draft: branches that go along in its batch for what the target says behind them.

Nothing of a branch is ever accepted. If the text does go on as it says, the next draft begins with the target's own
answer. That is worth 1.5 to 2.5 % where a drafted token is nearly free, as on some GPUs, and nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

from ngramspec.acceptance.verifier import Verifier
from ngramspec.backend import Logits, Model
from ngramspec.cost.curve import CostCurve
from ngramspec.decoding.drafts import Plan
from ngramspec.drafting.draft import Drafter, Question
from ngramspec.drafting.mixture.answers import CHEAP
from ngramspec.drafting.price import TokenPrice
from ngramspec.policies.policy import Policy


@runtime_checkable
class Asked(Model, Protocol):
    """A model whose passes can also evaluate branches beside the text.

    Attributes:
        leaves: most branches of a pass; 0: none can be asked.
    """

    leaves: int

    def ask(self, tokens: Sequence[int], questions: Sequence[Question]) -> Logits:
        """Append tokens as `evaluate` does; the logits after each token, then after each question.

        Args:
            tokens: at least one; with the questions at most `max_batch`. Their logits are those that `evaluate` gives
                with as many tokens more, bit for bit.
            questions: all different, each behind those that it rests on; they leave nothing in the cache.
        """


def with_questions(
    plan: Plan,
    drafter: Drafter | None,
    policy: Policy,
    price: TokenPrice | None,
    curve: CostCurve | None,
    sizes: Sequence[int],
    leaves: int,
) -> Plan:
    """A plan with the questions that are worth asking beside its draft, on at most `leaves` branches."""
    if drafter is None or price is None or price.slopes[0] > CHEAP or not plan.sent:
        return plan
    sent = len(plan.sent)
    # Behind the text's end nobody asks.
    found = drafter.questions(sent - plan.ends, sizes[-1] - 1 - sent, leaves, price)
    count, size = policy.ask(found, sent, plan.size, curve, sizes)
    return plan._replace(size=size, questions=found[:count])


def evaluate(model: Model, plan: Plan, last: int) -> Logits:
    """Evaluate what a plan sends, with its questions: the rows of the tokens, then those of the questions."""
    return cast(Asked, model).ask(plan.batch(last), plan.questions)


def answers(plan: Plan, rows: Logits, verifier: Verifier, tokens: Sequence[int], position: int) -> list[int]:
    """What the target said behind the last token, where it was asked.

    Args:
        plan: of the pass.
        rows: its logits.
        verifier: of the text.
        tokens: that the pass emitted.
        position: absolute index of the token after them.
    """
    questions = plan.questions
    behind = rows[plan.size - len(questions) :]
    asked = {
        question.path: row for question, row in zip(questions, behind, strict=True) if question.fork == len(tokens) - 1
    }
    path: tuple[int, ...] = (tokens[-1],)
    said: list[int] = []
    while path in asked:
        token = verifier.answer(asked[path], position + len(said))
        if token is None:
            break
        said.append(token)
        path = (*path, token)
    return said
