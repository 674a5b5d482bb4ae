"""`aegis top`: a server in a terminal."""
