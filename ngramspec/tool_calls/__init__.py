"""Tools and reasoning in chats: messages in the form of a template, and answers as deltas. No tokens, no HTTP."""
