"""The proxy, in three rooms: `http/` talks to clients, `routing/` decides, `live/` is the process that joins them."""
