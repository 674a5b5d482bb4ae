"""The bus (MQTT): heartbeats, the failure detector, commands of users, and the embedded broker.

The launcher and every instance connect to it, and so does `aegis ctl`.
"""
