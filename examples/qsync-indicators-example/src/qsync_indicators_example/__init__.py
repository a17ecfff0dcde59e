"""Indicators from publications, to compare with: the paper's printed formulas and its random baseline, and HAWQ's Hessian."""
