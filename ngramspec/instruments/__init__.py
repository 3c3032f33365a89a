"""Instruments: what measures, checks, tunes, records and replays drafting, and how it is reported.

benchmark            plain and drafted runs side by side; alpha by n-gram order; another server beside ours
replay               the decoding loop on recorded answers, with costs from a curve
selfcheck            do drafts change nothing here: texts are equal, and a rollback leaves no trace
tuning               which settings of a machine are the fastest
trace                every pass as a line of JSON
prompts              the texts that benchmark and self-check run on
memory_statistics    what a memory holds
reports              a `Report`, as Markdown, SVG and HTML
"""
