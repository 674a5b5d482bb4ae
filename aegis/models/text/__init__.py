"""Text and token ids: tokenizers, chat templates, and the process beside the proxy that runs both.

The HTTP layer calls it for every prompt and reply; registration writes the tokenizer's files.
"""
