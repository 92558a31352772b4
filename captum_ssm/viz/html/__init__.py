"""The report: one HTML file with its data, style and script, which makes no requests."""
