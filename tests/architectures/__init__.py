"""Tiny models of every architecture that llama.cpp runs, and whether drafts change their texts.

`models` names the architectures, `files` writes them, `reference` decodes them without ever rolling back, `settings`
lists what is tried and `comparison` judges it. `tools/matrix.py` runs all of it, `test_architectures.py` here what a
few minutes allow.
"""
