"""When a process is started again, and when not."""

from __future__ import annotations

from surefoot.launch.restarts import MAX_DELAY_SECONDS, WINDOW_SECONDS, GiveUp, Restart, RestartRule


def rule(max_restarts: int) -> RestartRule:
    made = RestartRule(max_restarts)
    made.came_up()
    return made


def die(rule: RestartRule, now: float) -> Restart | GiveUp:
    verdict = rule.died(now)
    rule.came_up()
    return verdict


def test_at_once_and_then_ever_later() -> None:
    made = rule(20)
    delays = [die(made, now=float(now)) for now in range(12)]
    assert delays == [Restart(delay) for delay in (0, 1, 2, 4, 8, 16, 32, *[MAX_DELAY_SECONDS] * 5)]


def test_too_many_within_the_window() -> None:
    made = rule(2)
    assert [die(made, now) for now in (0.0, 1.0)] == [Restart(0), Restart(1)]
    assert die(made, 2.0) == GiveUp(True, "; it has died 3 times within 10 minutes")


def test_old_deaths_do_not_count() -> None:
    made = rule(1)
    for now in range(5):
        assert die(made, now * WINDOW_SECONDS) == Restart(0)


def test_a_first_start_that_fails_is_not_repeated() -> None:
    verdict = RestartRule(5).died(0.0)
    assert isinstance(verdict, GiveUp)
    assert not verdict.in_loop


def test_no_restarts_at_all() -> None:
    verdict = rule(0).died(0.0)
    assert isinstance(verdict, GiveUp)
    assert not verdict.in_loop


def test_two_failed_starts_in_a_row() -> None:
    made = rule(100)
    assert made.died(0.0) == Restart(0)
    assert made.died(1.0) == Restart(1)
    assert made.died(2.0) == GiveUp(True, "; it has died 2 times in a row while it started")


def test_one_failed_start_between_two_deaths() -> None:
    made = rule(100)
    assert [made.died(0.0), die(made, 1.0), made.died(2.0), die(made, 3.0)] == [Restart(d) for d in (0, 1, 2, 4)]
