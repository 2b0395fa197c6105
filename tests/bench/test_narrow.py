import numpy as np
import pytest
from bench.stigmergy.learners import gini, train
from bench.stigmergy.passage import BACK, FORWARD, OURS, REPORTED, Passage


def world(num_agents: int = 2, tunnel: int = 2) -> Passage:
    return Passage(num_agents, tunnel, np.random.default_rng(0))


def test_one_agent_fetches_a_pellet_in_six_moves() -> None:
    alone = world(1)
    rewards = [alone.move(0, action) for action in (FORWARD,) * 3 + (BACK,) * 3]
    assert rewards == [-0.1, -0.1, OURS.picked_up, -0.1, -0.1, OURS.delivered]
    assert (alone.delivered, alone.cells) == ([1], [0])


def test_two_agents_that_meet_in_the_tunnel_block_each_other() -> None:
    both = world()
    both.move(0, FORWARD)
    assert both.move(1, FORWARD) == OURS.collided
    for _ in range(2):
        both.move(0, FORWARD)
    both.move(1, FORWARD)
    both.move(0, BACK)
    assert both.cells == [2, 1]
    assert (both.move(0, BACK), both.move(1, FORWARD)) == (OURS.collided, OURS.collided)
    assert (both.num_collisions, both.cells) == (3, [2, 1])
    assert both.seen_by(0)[:4] == (2, True, False, True)


def test_by_the_reported_rules_a_step_on_ones_way_is_rewarded_and_a_neighbours_cargo_seen() -> None:
    both = Passage(2, 2, np.random.default_rng(0), rules=REPORTED)
    rewards = [both.move(0, action) for action in (FORWARD, BACK, FORWARD, FORWARD, FORWARD, BACK, FORWARD)]
    assert rewards == [0.5, -0.5, 0.5, 0.5, 10.0, 0.5, -0.5]
    both.move(0, BACK)
    both.move(1, FORWARD)
    assert both.seen_by(0)[:4] == (2, True, 0, 1)
    assert both.seen_by(1)[:4] == (1, False, 2, 0)


def test_traces_say_that_someone_is_further_in() -> None:
    both = world(2, 4)
    for _ in range(2):
        both.move(0, FORWARD)
    both.evaporate()
    assert both.traces == [0.0, 0.0, 0.1, 0.0, 0.0, 0.0]
    both.evaporate()
    assert both.traces[1:4] == pytest.approx([0.95 * 0.01, 0.95 * 0.08 + 0.1, 0.95 * 0.01])
    for _ in range(20):
        both.evaporate()
    assert both.seen_by(1) == (0, False, False, False, 1, 0)
    assert Passage(2, 4, np.random.default_rng(0), has_traces=False).seen_by(1)[4:] == (0, 0)


def test_the_asymmetry_is_zero_alike_and_three_quarters_where_one_of_four_does_it_all() -> None:
    assert (gini([3, 3, 3, 3]), gini([0, 0, 0, 8]), gini([0, 0])) == (0.0, 0.75, 0.0)


def test_one_agent_learns_to_fetch_pellets() -> None:
    result = train(1, tunnel=2, has_traces=False, num_episodes=60, num_judged=5, seed=1)
    assert 20 < result.delivered <= 33  # a pellet takes six steps


def test_agents_that_are_alike_learn_to_share_the_passage() -> None:
    alike = train(2, tunnel=2, has_traces=True, num_episodes=200, num_judged=5, seed=1, rules=REPORTED, are_alike=True)
    assert alike.delivered > 20
