"""Protection of the server from strangers: HTTP bounds, API keys, permits, and a limit on bodies in memory.

`proxy.http.app` puts it around all routes, and routes ask it for permits.
"""
