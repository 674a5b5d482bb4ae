"""The tables of `docs/` and README: what is in `bench/results`, as Markdown, with the bars that were missed.

`docs/generate.py` writes them.
"""
