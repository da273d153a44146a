"""doctor: it does not work; whose side is it, and what to type.

A URL goes through an ordered chain of checks (`chain.py`), files through linters (`files.py`), logs through
recognisers (`logs.py`). All of them give `Finding`s, and `report.py` ends with one sentence.
"""
