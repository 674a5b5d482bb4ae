"""Checkpoints that are one GGUF file: its header, its blocks of quantised weights, and the configuration, tensors and
tokenizer that transformers would have of the same model."""
