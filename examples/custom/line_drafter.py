"""A drafter that repeats the previous line. Its name is `examples/custom/line_drafter.py:LineDrafter`."""

from ngramspec import Draft, Drafter


class LineDrafter(Drafter):
    """Drafts the rest of the previous line, from the first occurrence of the last token."""

    def begin(self, prompt):
        self.lines = [[]]  # the tokens of each line
        self.accept(prompt)

    def propose(self, ask):
        previous, current = ([], *self.lines)[-2:]
        if current and current[-1] not in previous:
            return Draft()
        start = previous.index(current[-1]) + 1 if current else 0
        return Draft(tuple(previous[start : start + ask.limit]))

    def accept(self, tokens):
        for token in tokens:
            self.lines[-1].append(token)
            if self.vocabulary and b"\n" in self.vocabulary.piece(token):
                self.lines.append([])
