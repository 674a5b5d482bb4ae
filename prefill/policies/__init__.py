"""Prefill policies, one per file."""
