"""The REST API: the application, its settings, and the interface (`market`) through which it reaches the rest of aegis.

`proxy.live` serves it; its rooms are one each for routes, reading, streaming, output, admin and security.
"""
