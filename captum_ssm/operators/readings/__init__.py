"""Readings of operators: gradients of coefficients, states and their factors, tiles of rows."""
