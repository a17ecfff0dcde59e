"""The scripts of rows C1 to C11: real clusters, one script a row."""
