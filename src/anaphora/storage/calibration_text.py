"""The built-in text that a model reads once to be calibrated: prose, chat, Chinese, code, tables, other languages.

A change of a single character changes the stored form of every model: raise `calibration.VERSION` with it.
"""

from __future__ import annotations

TEXT = """\
The committee met on Tuesday to discuss the repair of the bridge over the river. Its chairman, who had built two
others, explained that the second pier had moved by about 14 millimetres since 1987, and that the cheapest offer was
2,350,000 euros. Nobody was surprised. "Either we close it in March," said the engineer, "or we wait until it closes
itself." They voted nine to four, and the minutes were sent to the newspapers on Friday.

User: What is the difference between a list and a tuple? Answer in one sentence.
Assistant: A list can be changed after it was made, a tuple cannot; so a tuple can be the key of a dictionary.

今天上午，图书馆的工作人员把三百多本旧书搬到了二楼。新的阅览室有十二张桌子，窗户朝南，下午阳光很好。读者可以在这里看报纸、查资料，也可以用电脑上网。

def moving_average(values: list[float], width: int) -> list[float]:
    \"""Mean of the last `width` values at every place.\"""
    total, out = 0.0, []
    for i, value in enumerate(values):
        total += value - (values[i - width] if i >= width else 0.0)
        out.append(total / min(i + 1, width))
    return out

{"id": 4821, "name": "sensor-07", "ok": true, "readings": [20.5, 21.0, 19.75], "unit": "C"}

| city | population | founded |
|---|---|---|
| Lisbon | 545,796 | 1147 |

Der Zug nach Basel hat heute zehn Minuten Verspätung. Le marché ouvre à huit heures, sauf le dimanche.
"""
