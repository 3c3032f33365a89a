"""Tools that measure, check, tune, record and replay drafting, and reports on their results.

benchmark            comparison of plain and drafted runs; comparison with another server
replay               simulation of the decoding loop on recorded answers, with costs from a curve
selfcheck            tests that drafts change no text on this machine, and that a rollback restores the cache
tuning               search for the fastest settings of a machine
trace                record of every pass as JSON Lines
prompts              prompts of benchmark and self-check
reports              `Report`, and its output as Markdown, SVG and HTML
"""
