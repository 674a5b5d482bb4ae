"""LoRA adapters in PEFT's format: what is read of them, what is refused, and their images."""
