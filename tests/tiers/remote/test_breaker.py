"""The circuit breaker: when a store is asked and when it is left alone."""

from __future__ import annotations

import pytest

from anaphora.tiers.remote.breaker import Circuit, CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(failures=3, pause=1.0, longest_pause=4.0, clock=clock)


def state(breaker: CircuitBreaker) -> Circuit:
    return breaker.state


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        assert breaker.allows()
        breaker.failed()


def test_opens_after_failures_in_a_row_only(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert state(breaker) is Circuit.CLOSED
    fail(breaker, 1)
    assert state(breaker) is Circuit.OPEN
    assert not breaker.allows()


def test_one_caller_tries_after_the_pause_and_closes_it(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 0.9
    assert not breaker.allows()
    clock.now += 0.2
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    assert state(breaker) is Circuit.HALF_OPEN
    breaker.succeeded()
    assert state(breaker) is Circuit.CLOSED
    assert breaker.allows()


def test_the_pause_doubles_up_to_its_limit_and_starts_anew(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    for pause in (1.0, 2.0, 4.0, 4.0):
        clock.now += pause - 0.01
        assert not breaker.allows()
        clock.now += 0.02
        fail(breaker, 1)
    clock.now += 4.1
    assert breaker.allows()
    breaker.succeeded()
    fail(breaker, 3)
    clock.now += 1.1
    assert breaker.allows()


def test_a_lost_try_costs_one_pause(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 1.1
    assert breaker.allows()
    clock.now += 1.1
    assert breaker.allows()


def test_calls_that_began_before_do_not_lengthen_the_pause(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    for _ in range(5):
        breaker.failed()
    clock.now += 1.1
    assert breaker.allows()
