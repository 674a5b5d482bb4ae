"""The picture of what long prompts do."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from bench.interference.picture import svg
from bench.interference.suite import Timeline

BARS = ("long", "short")


def test_every_token_that_is_seen_has_a_tick_and_every_prompt_a_bar() -> None:
    stands = Timeline(tokens_s=[-9.0, -0.1, 0.0, 4.0, 4.2, 9.0], long_s=4.0, short_sent_s=0.1, short_s=4.1)
    yields = Timeline(tokens_s=[0.1 * at for at in range(45)], long_s=4.1, short_sent_s=0.1, short_s=0.2)
    text = svg("<now>", [("before & after", stands), ("now", yields)])
    root = ElementTree.fromstring(text)
    assert root.find("{*}title").text == "<now>"  # type: ignore[union-attr]
    ticks = [len(re.findall("M", path.attrib["d"])) for path in root.iterfind("{*}path[@class='token']")]
    assert ticks == [4, 45], "none from before the picture, and none from after it"
    long, short = ([float(bar.attrib["width"]) for bar in root.iterfind(f"{{*}}rect[@class='{of}']")] for of in BARS)
    assert long[1] > long[0] and short[0] > 30 * short[1]
