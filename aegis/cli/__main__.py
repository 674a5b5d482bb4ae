"""`python -m aegis.cli`."""

from aegis.cli.main import main

main()
