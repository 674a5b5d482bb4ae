"""Engines: they run batches of one model over paged KV, with transformers or vLLM, and sample tokens.

The workers of `prefill` and `decode` call them, and registration checks new models with them.
"""
