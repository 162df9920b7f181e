"""Products shared between threads are plain products."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from forebay.engines.embedded.parallel import Linear, Team
from forebay.engines.embedded.sampling import choose, draw, greedy


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 40, 300])
@pytest.mark.parametrize("shape", [(960, 64), (100, 48), (1, 8)])
def test_a_shared_product_is_the_product(threads: int, rows: int, shape: tuple[int, int]) -> None:
    chance = np.random.default_rng(rows)
    weights = chance.standard_normal(shape, dtype=np.float32)
    activations = chance.standard_normal((shape[1], rows), dtype=np.float32)
    team = Team(threads)
    product = Linear(team, weights)(weights, activations)
    team.close()
    assert product.dtype == np.float32
    assert product.flags.c_contiguous
    np.testing.assert_allclose(product, weights @ activations, atol=1e-4, rtol=1e-4)


def test_tasks_run_at_the_same_time() -> None:
    team = Team(2)
    both = threading.Barrier(2, timeout=5)
    team.share([both.wait, both.wait])
    team.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_in_any_thread_reaches_the_caller_and_the_team_lives_on(failing: int) -> None:
    def fail() -> None:
        raise ValueError("broken")

    team = Team(2)
    done: list[int] = []
    tasks = [fail, lambda: done.append(1)]
    with pytest.raises(ValueError, match="broken"):
        team.share(tasks if failing == 0 else tasks[::-1])
    team.share([lambda: done.append(2), lambda: done.append(3)])
    team.close()
    assert sorted(done) == [1, 2, 3]


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = np.array([[1, 5, 0], [3, 5, -1], [3, 2, -2]], np.float32)
    assert greedy(logits) == [1, 0, 0]
    assert greedy(logits[:, :1]) == [1]


def test_draws_follow_the_softmax() -> None:
    from random import Random

    chance = Random(5)
    logits = np.log(np.array([0.1, 0.2, 0.7], np.float32))
    counts = np.bincount([draw(logits, 1.0, chance) for _ in range(4000)], minlength=3) / 4000
    np.testing.assert_allclose(counts, [0.1, 0.2, 0.7], atol=0.03)
    sharp = np.bincount([draw(logits, 0.2, chance) for _ in range(500)], minlength=3)
    assert sharp[2] > 490


def test_a_seed_repeats_its_draws_and_greedy_columns_stay_greedy() -> None:
    from random import Random

    logits = np.random.default_rng(1).standard_normal((50, 2), dtype=np.float32)
    first = [choose(logits, [(1.0, chance), None]) for chance in [Random(9)] for _ in range(20)]
    again = [choose(logits, [(1.0, chance), None]) for chance in [Random(9)] for _ in range(20)]
    assert first == again
    assert len({tokens[0] for tokens in first}) > 5
    assert {tokens[1] for tokens in first} == {int(logits[:, 1].argmax())}
