"""Grammars as text: GBNF, JSON schemas and regular expressions in the Lark dialect of llguidance.

Nothing here needs a vocabulary; `ngramspec.llama.grammar` compiles the result for one.
"""
