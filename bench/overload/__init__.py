"""`aegis bench overload`: a server that is offered up to four times what it can do. The command line calls it."""
