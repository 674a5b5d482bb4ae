"""The routes of OpenAI's Responses API, as translations of chat completions, and what is kept of answers for it.

`proxy.http.app` mounts them.
"""
