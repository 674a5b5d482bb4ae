"""The server that a measurement launches for itself."""

from bench.common.served import environment_of


def test_it_has_no_keys_that_its_clients_would_not_send() -> None:
    keys = dict.fromkeys(["AEGIS_API_KEY", "AEGIS_API_KEY_FILE", "AEGIS_ADMIN_KEY", "AEGIS_ADMIN_KEY_FILE"], "x")
    others = {"AEGIS_DEVICE_MEMORY": "64MiB", "OPENAI_API_KEY": "x", "PATH": "/bin"}
    assert environment_of(keys | others) == others
