"""Benchmark prompts: one TOML file per category; see README.md beside this file."""
