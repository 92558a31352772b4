"""The report: one HTML file that holds its data, its style and its script, and asks for nothing."""
