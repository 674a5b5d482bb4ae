"""`/openapi.json`: the schema of what the server takes and answers.

`proxy.http.app` serves it.
"""
