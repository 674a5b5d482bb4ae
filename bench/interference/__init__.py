"""`aegis bench interference`: what a long prompt does to the others of a server. The command line calls it."""
