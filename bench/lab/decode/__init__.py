"""Decoding beside transformers and beside stock vLLM: `aegis lab decode`.

`bench.lab.commands` calls it.
"""
