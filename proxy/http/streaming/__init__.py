"""From tokens to the client's socket: text, stop strings, reasoning, server-sent events and keep-alive.

The routes of `openai/` drive it.
"""
