"""What aegis's proxy costs, beside LiteLLM's: `aegis lab proxy`."""
