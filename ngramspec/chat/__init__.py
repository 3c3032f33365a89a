"""Chats: templates, prompts, histories, tool calls and reasoning."""
