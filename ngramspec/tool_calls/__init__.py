"""Tools and thoughts in chats: conversations into templates, answers into deltas. Pure text: no tokens, no HTTP."""

from ngramspec.tool_calls.families import begun_answer
from ngramspec.tool_calls.forced import forced_grammar, thoughts_first
from ngramspec.tool_calls.parser import AnswerParser, parser_for, thoughts_parser

__all__ = ["AnswerParser", "begun_answer", "forced_grammar", "parser_for", "thoughts_first", "thoughts_parser"]
