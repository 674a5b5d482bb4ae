"""Structured output: compiles grammars, masks the tokens they forbid, and tries grammars out in a process of its own.

Engines mask with them; the proxy tries a client's grammar out before it admits the request.
"""
