"""What aegis's proxy costs, beside LiteLLM's: `aegis bench proxy`."""
