"""Tiny models of every architecture that llama.cpp runs, and tests that drafts do not change their texts.

`models` lists the architectures, `files` writes the models, and `reference` decodes without rollbacks. `settings`
lists the tested sessions and `comparison` compares their results. `tools/matrix.py` runs all of them, and
`test_architectures.py` a selection that takes a few minutes.
"""
