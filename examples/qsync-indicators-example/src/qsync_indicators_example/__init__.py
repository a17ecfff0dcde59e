"""Indicators from publications, to compare with: the paper's printed formulas, and HAWQ's Hessian."""
