"""Reading a request: its body, fields, messages, prompts, sampling parameters and id; and the text workers' client.

The routes of `openai/` and `admin/` call it.
"""
