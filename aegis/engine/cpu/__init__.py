"""Decode steps on a processor as one call into compiled code, for models of Llama's kind.

The code is C, compiled where aegis is installed if there is a compiler. Without it, on other processors, and for models
of other kinds, steps run through transformers' modules as everywhere else.
"""
