"""The routes of OpenAI's API: completions, chat, models and tokenizing, and the wording of their replies.

`proxy.http.app` mounts them.
"""
