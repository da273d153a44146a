"""The latest outcomes, by age and by id."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from threading import Lock

from anaphora.explain.outcome import Outcome


class Ring:
    """At most `limit` outcomes; the oldest is dropped. One thread adds, others may read."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._outcomes)

    def add(self, outcome: Outcome) -> None:
        """An id that comes again replaces the older one."""
        with self._lock:
            self._outcomes.pop(outcome.request_id, None)
            self._outcomes[outcome.request_id] = outcome
            if len(self._outcomes) > self.limit:
                self._outcomes.popitem(last=False)

    def get(self, request_id: str) -> Outcome | None:
        return self._outcomes.get(request_id)

    def last(self, count: int) -> list[Outcome]:
        """The latest ones, newest first."""
        with self._lock:
            return list(islice(reversed(self._outcomes.values()), count))

    def find(self, request_id: str) -> list[Outcome]:
        """That of a sequence, or those of all sequences of an answer: their ids are the answer's, "-" and a number."""
        exact = self._outcomes.get(request_id)
        if exact is not None:
            return [exact]
        head = f"{request_id}-"
        return [o for o in reversed(self.last(self.limit)) if o.request_id.startswith(head)]
