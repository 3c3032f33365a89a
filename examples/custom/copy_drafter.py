"""A drafter that copies. Its name is `examples/custom/copy_drafter.py:CopyDrafter`."""

from ngramspec import Draft, Drafter


class CopyDrafter(Drafter):
    """Drafts the tokens that followed the previous occurrence of the last two tokens."""

    def begin(self, prompt):
        self.text = []
        self.next = {}  # two tokens -> position after their last occurrence
        self.accept(prompt)

    def propose(self, ask):
        start = self.next.get(tuple(self.text[-2:]), len(self.text))
        return Draft(tuple(self.text[start : start + ask.limit]))

    def accept(self, tokens):
        for token in tokens:
            if len(self.text) >= 2:
                self.next[tuple(self.text[-2:])] = len(self.text)
            self.text.append(token)
