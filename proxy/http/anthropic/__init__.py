"""The routes of Anthropic's API: messages, and the count of their tokens, as translations of chat completions.

`proxy.http.app` mounts them.
"""
