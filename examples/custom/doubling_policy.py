"""A policy with a growing draft length. Its name is `examples/custom/doubling_policy.py:DoublingPolicy`."""

from ngramspec import Policy


class DoublingPolicy(Policy):
    """Doubles the draft length after a fully accepted draft, and resets it to one after any other."""

    def __init__(self, draft_max=16):
        self.draft_max, self.length = draft_max, 1

    def limit(self):
        return self.length

    def record(self, done):
        if done.drafted:
            accepted = done.accepted == len(done.drafted)
            self.length = min(self.draft_max, 2 * self.length) if accepted else 1
