"""Tools and thoughts in chats: conversations into templates, answers into deltas. Pure text: no tokens, no HTTP."""
