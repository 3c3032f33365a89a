"""Benchmark prompts: one TOML file per category; README.md in this folder describes them."""
