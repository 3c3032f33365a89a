"""Grammars as text: GBNF, JSON schemas and regular expressions in the Lark dialect of llguidance."""
