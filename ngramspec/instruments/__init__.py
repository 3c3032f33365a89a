"""Tools that measure, check, tune, record and replay drafting, and reports on their results."""
