"""Compiled circuits: models whose weights are set by construction, so that causes are known."""
