"""Chat templates: from messages to the text and tokens of a prompt."""
