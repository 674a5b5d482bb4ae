"""`aegis top`: a view of a running server in the terminal.

`aegis.cli.commands` adds the command; its figures come over the admin API.
"""
