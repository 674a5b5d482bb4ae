"""The cost of aegis's proxy, beside LiteLLM's: `aegis lab proxy`.

The command line calls it.
"""
