"""Reports to post: tables, charts and marked texts as data, and how they become Markdown, SVG and HTML. Pure text."""
