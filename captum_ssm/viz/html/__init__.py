"""Write a report: one HTML file with data, styles and scripts, which makes no requests."""
