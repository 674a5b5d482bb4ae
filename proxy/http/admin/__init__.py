"""Routes for those who run a server: health, metrics, models, memory and the recent past.

`proxy.http.app` mounts them; `aegis.admin_client` and the dashboard call them.
"""
