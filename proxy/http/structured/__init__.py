"""Structured output and tools: JSON Schemas, response formats, and tool calls found in replies.

The readers of requests and the chat route call it.
"""
