"""Real services and a real broker, fed by a synthetic trainer."""

from tests.support import examples
from tests.support.control_plane import control_plane, one_node_job, report_of

from dynamix.schemas import subjects
from dynamix.schemas.messages import MetricWindow, Reward, State
from dynamix.schemas.streams import FEED

SPEEDS = (3000.0, 3000.0, 3000.0, 1000.0)


async def test_a_report_becomes_a_window_a_state_a_reward_and_an_action_in_each_generation() -> None:
    async with control_plane("collector", "reward", "arbitrator") as plane:
        job = one_node_job()
        await plane.bus.publish(job)
        for window in range(2):
            await plane.bus.publish(report_of(job, window, (128,) * 4, SPEEDS))
            actions = await plane.wait_for_actions(window + 1)
        assert actions[0].local_batch_sizes == (154, 154, 153, 51)
        assert actions[0].deltas == (26, 26, 25, -77)
        assert [action.window for action in actions] == [0, 1]
        windows = await plane.wait_for(FEED.name, subjects.of("window", examples.JOB, "*"), 2)
        states = await plane.wait_for(FEED.name, subjects.of("state", examples.JOB, "*"), 2)
        rewards = await plane.wait_for(FEED.name, subjects.of("reward", examples.JOB, "*"), 2)
        window = windows[1]  # counters have a predecessor, and this very process was believed and read
        assert isinstance(window, MetricWindow)
        assert (window.probe, window.refused_pids) == ("tcp_info", ())
        rank = window.ranks[0]
        assert rank.network is not None
        assert rank.network.tx_bytes == 1000
        assert rank.system.cpu_time_ratio is not None
        assert rank.system.memory_bytes is not None
        assert rank.system.memory_bytes > 1 << 20
        assert isinstance(states[0], State)
        assert isinstance(rewards[0], Reward)
        assert rewards[0].formula == "paper-sgd"
        assert rewards[0].ranks[0].terms["accuracy"] == 0.75

        again = one_node_job(generation=1, initial_local_batch_sizes=(154, 154, 153, 51))
        await plane.bus.publish(again)
        await plane.bus.publish(report_of(again, 0, (154, 154, 153, 51), SPEEDS))
        *_, old, new = await plane.wait_for_actions(3)
        assert (new.generation, new.window, new.previous_hash) == (1, 0, old.hash)
        assert new.deltas == (0, 0, 0, 0)
