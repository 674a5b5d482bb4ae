"""What the proxy of aegis costs, beside LiteLLM's: `aegis lab proxy`.

The command line calls it.
"""
