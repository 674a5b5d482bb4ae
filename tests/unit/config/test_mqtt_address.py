import pytest

from aegis.config.mqtt_address import Address, parse

PASSWORD = "s3:cr@t"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("mqtt://broker", Address(host="broker", port=1883)),
        ("mqtts://broker", Address(host="broker", port=8883, tls=True)),
        ("mqtt://me:s3%3Acr%40t@[::1]:99/", Address(host="::1", port=99, user="me", password=PASSWORD)),
        ("mqtt+unix:///run/mqtt.sock", Address(path="/run/mqtt.sock")),
    ],
)
def test_urls(url: str, address: Address) -> None:
    assert parse(url) == address


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://me:s3cret@broker", "should begin with mqtt://"),
        ("mqtt://me:s3cret@broker:port", "is no URL"),
        ("mqtt://me:s3cret@broker:99999", "is no URL"),
        ("mqtt://me:s3cret@", "names no host"),
        ("mqtt://me:s3cret@broker/lab", "--mqtt-prefix"),
        ("mqtt://me:s3cret@broker?x=1", "should end with the port"),
        ("mqtt+unix://run/mqtt.sock", "whole path"),
        ("broker", "should begin with"),
    ],
)
def test_what_is_wrong_is_told_without_the_password(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        parse(url)
    assert "s3cret" not in str(refused.value)


def test_an_address_is_shown_without_the_password() -> None:
    address = parse("mqtts://me:s3cret@broker")
    assert str(address) == "mqtts://broker:8883"
    assert "s3cret" not in repr(address)
