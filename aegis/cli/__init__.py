"""The commands of `aegis`: each module holds the options of one command and calls the room that does the work.

Only the console script imports this package.
"""
