"""The page in a headless Chromium: a job that trains, a phone, dark colours, many ranks, captures, the keyboard."""

import asyncio
import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from bench.jobs import Load, job_of
from tests.support import examples
from tests.support.brokers import connected
from tests.support.browser import Browser, find_browser
from tests.support.capture_files import write
from tests.support.examples import applied, event
from tests.support.recordings import DEMO

from dynamix.cli.dashboard.server import DashboardServer
from dynamix.cli.documents import CapturedJob
from dynamix.cli.fleet import Fleet
from dynamix.recording.capture import read_header, records
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.schemas.messages import Live

needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium: apt-get install chromium")
pytestmark = [needs_browser, pytest.mark.slow, pytest.mark.timeout(300)]

EMPTY = "[...document.querySelectorAll('.panel > .empty')].filter(note => !note.hidden).map(note => note.textContent)"
DRAWN = "document.querySelectorAll('.u-over').length"
PLACES = """JSON.stringify([...document.querySelectorAll('.panel, .tile, nav, #alarms')].map(one => {
    const box = one.getBoundingClientRect();
    return [box.x, box.y, box.width, box.height].map(Math.round);
}))"""
"""Where everything is, in pixels."""
PANES_AT = "[...document.querySelectorAll('.title')].filter(title => title.innerText.includes('{}')).length"
MOVE_SLIDER = """(() => {
    const time = document.querySelector('#time');
    time.value = time.max / 2;
    time.dispatchEvent(new Event('input'));
})()"""
SCALES = """window.page.panes.map(pane => ['x', 'y'].map(axis => {
    const scale = pane.charts.loss.plot.scales[axis];
    return [scale.min, scale.max];
}))"""
PLOT_AT = """(() => {
    const box = document.querySelector('.u-over').getBoundingClientRect();
    return [box.x, box.y, box.width, box.height];
})()"""
SERVICES = ("collector", "reward", "arbitrator")


class Bench(NamedTuple):
    """What feeds a live page, and the page's server; they run in the portal's event loop, in a thread of its own."""

    portal: BlockingPortal
    bus: Bus
    server: DashboardServer

    def publish(self, *messages: Any) -> None:
        for message in messages:
            self.portal.call(self.bus.publish, message)


async def beat(bus: Bus) -> None:
    """Heartbeats of all services."""
    for uptime_s in itertools.count(0.0, 0.5):
        for service in SERVICES:
            await bus.publish_live(Live(service=service, instance="one", uptime_s=uptime_s, node="node-a"))
        await asyncio.sleep(0.5)


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as found:
        yield found


@pytest.fixture
def bench(portal: BlockingPortal) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(portal.wrap_async_context_manager(EmbeddedServer()))
        bus = stack.enter_context(portal.wrap_async_context_manager(connected(broker.settings)))
        portal.call(provision, bus)
        fleet = Fleet(bus)
        stack.enter_context(portal.wrap_async_context_manager(fleet.following()))
        server = DashboardServer(host="127.0.0.1", port=0, token="", fleet=fleet)
        stack.enter_context(portal.wrap_async_context_manager(server))
        stack.callback(portal.start_task_soon(beat, bus).cancel)
        yield Bench(portal, bus, server)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def page_of(*captures: CapturedJob) -> DashboardServer:
    return DashboardServer(host="127.0.0.1", port=0, token="", captures=list(captures))


def train(bench: Bench, *windows: int) -> None:
    """Windows, rewards and decisions of the example's four ranks."""
    for window in windows:
        for node, ranks in (("node-a", (0, 1)), ("node-b", (2, 3))):
            metrics = examples.window(node, ranks, window, job_metrics=examples.job_metrics(loss=2.0 / (1 + window)))
            busy = msgspec.structs.replace(metrics.node_metrics, cpu_time_ratio=0.5)
            bench.publish(msgspec.structs.replace(metrics, node_metrics=busy), examples.reward(node, ranks, window))
        bench.publish(examples.action(window), applied(window, window + 2))


def shown(browser: Browser, url: str, holds: str, *, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
    browser.open("about:blank")  # the page before it would complain that its server is gone
    browser.wait_for("location.href === 'about:blank'")
    browser.events.clear()
    browser.resize(width, height, dark=dark)
    browser.open(url)
    browser.wait_for(holds)


def test_a_job_that_trains_fills_every_panel_and_nothing_moves(bench: Bench, browser: Browser) -> None:
    shown(browser, bench.server.url, "document.querySelectorAll('.panel').length === 14")
    browser.wait_for("document.querySelector('#jobs-empty').textContent.includes('waits for a job')")
    assert all(re.match(r"waits for|none so far", note) for note in browser.evaluate(EMPTY))
    assert len(browser.evaluate(EMPTY)) == 14, "a panel without data says what it waits for"
    before = browser.evaluate(PLACES)
    bench.publish(examples.job())
    train(bench, 0, 1, 2)
    browser.wait_for(f"{DRAWN} === 9")
    assert browser.evaluate(EMPTY) == ["none so far"]
    browser.wait_for("document.querySelector('#job-list a').textContent.includes('running')")
    assert browser.evaluate(PLACES) == before
    assert "mnist-0a1b2c3d" in browser.text()
    assert browser.evaluate("document.querySelectorAll('.bar').length") == 4
    bench.publish(examples.action(7, local_batch_sizes=(150, 150, 150, 62), deltas=(22, 22, 22, -66)))
    browser.wait_for("document.querySelector('tbody td').textContent === '7'")
    row = browser.evaluate("document.querySelector('tbody tr').innerText")
    assert "+22 +22 +22 -66" in row
    assert "not yet" in row
    bench.publish(applied(7, 9))
    browser.wait_for("document.querySelector('tbody tr').innerText.includes('window 9')")
    bench.publish(event(2))
    browser.wait_for("document.querySelector('#alarms').textContent.includes('size-stuck')")
    assert browser.errors() == []
    origin = bench.server.url
    assert {url for url in browser.requests() if not url.startswith((origin, "data:"))} == set()


def test_ten_jobs_of_32_ranks_are_listed_and_each_can_be_chosen_by_keyboard(bench: Bench, browser: Browser) -> None:
    jobs = [job_of(f"many-{number:08x}", 32, "proportional") for number in range(10)]
    bench.publish(*jobs)
    for job in jobs:
        load = Load(job, num_variants=1)
        for window in range(3):
            bench.publish(*load.windows(window), *load.rewards(window))
    shown(browser, bench.server.url, "document.querySelectorAll('#job-list a').length === 10")
    browser.wait_for("document.querySelectorAll('.bar').length === 32")
    assert browser.evaluate("document.querySelector('.legend').innerText").split()[::2] == [
        "largest",
        "median",
        "smallest",
    ]
    browser.evaluate("document.querySelector('#job-list li:nth-child(4) a').focus()")
    browser.press("Enter")
    browser.wait_for("document.querySelector('.title h2').textContent === 'many-00000006'")
    browser.wait_for("document.querySelectorAll('.bar').length === 32")
    browser.evaluate("document.querySelector('.panel .body[role=img]').focus()")
    newest = browser.evaluate("document.querySelector('.panel .body[role=img]').getAttribute('aria-label')")
    assert newest.startswith("Local batch size in samples per step over 3 windows; newest: largest 96")
    browser.press("ArrowLeft")
    assert browser.evaluate("document.activeElement.getAttribute('role')") == "img"
    assert browser.errors() == []


def test_a_phone_shows_nothing_beyond_its_edge_and_dark_colours(bench: Bench, browser: Browser) -> None:
    bench.publish(examples.job())
    train(bench, 0, 1)
    shown(browser, bench.server.url, f"{DRAWN} === 9", width=390, height=844, dark=True)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    background = browser.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert background == "rgb(20, 23, 28)"


def test_a_capture_has_a_slider_and_two_stand_beside_each_other(portal: BlockingPortal, browser: Browser) -> None:
    captured = CapturedJob(DEMO)
    with portal.wrap_async_context_manager(page_of(captured, captured)) as server:
        shown(browser, server.url, f"{DRAWN} === 18")
        assert browser.evaluate(PANES_AT.format("window 29")) == 2
        first, second = browser.evaluate("[...document.querySelectorAll('.pane')].map(one => one.offsetLeft)")
        assert second > first + 500
        browser.evaluate(MOVE_SLIDER)
        browser.wait_for("!document.querySelector('.title').innerText.includes('window 29')")
        half = f"{captured.duration_s / 2:.1f} s of {captured.duration_s:.1f} s"
        assert browser.evaluate("document.querySelector('#moment').textContent") == half
        browser.evaluate("document.querySelector('#time').focus()")
        browser.press("ArrowRight")
        browser.wait_for(f"document.querySelector('#moment').textContent !== '{half}'")
        assert browser.errors() == []


def test_two_captures_have_the_same_axes_and_are_enlarged_together(
    portal: BlockingPortal, browser: Browser, tmp_path: Path
) -> None:
    found = list(records(DEMO))
    shorter = write(tmp_path / "part.dxc", found[: len(found) * 2 // 3], job=read_header(DEMO).job)
    whole, part = CapturedJob(DEMO), CapturedJob(shorter)
    assert part.duration_s < whole.duration_s - 5
    with portal.wrap_async_context_manager(page_of(whole, part)) as server:
        shown(browser, server.url, f"{DRAWN} === 18", width=1600)
        first, second = browser.evaluate(SCALES)
        assert first == second, "a shorter run is drawn to the same scales"
        browser.evaluate("document.querySelector('.panel .body[role=img]').focus()")
        for key in ("Home", "+", "+"):
            browser.press(key)
        for pane in browser.evaluate(SCALES):
            assert pane[0][0] == first[0][0]
            assert pane[0][1] - pane[0][0] == pytest.approx((first[0][1] - first[0][0]) / 4)
        assert browser.evaluate("window.page.panes[0].charts.sizes.plot.cursor.idx") == 0
        browser.press("Escape")
        browser.wait_for("window.page.panes.every(pane => pane.charts.loss.zoom === null)")
        assert browser.evaluate(SCALES) == [first, second]
        assert browser.errors() == []


def test_what_is_enlarged_stays_while_windows_come(bench: Bench, browser: Browser) -> None:
    bench.publish(examples.job())
    train(bench, *range(8))
    shown(browser, bench.server.url, f"{DRAWN} === 9")
    browser.wait_for("document.querySelector('.title').innerText.includes('window 7')")
    left, top, width, height = browser.evaluate(PLOT_AT)
    browser.drag(left + width / 4, left + width / 2, top + height / 2)
    shown_part = (
        "['loss', 'cpu'].map(name => {const x = window.page.pane.charts[name].plot.scales.x; return [x.min, x.max]})"
    )
    browser.wait_for("window.page.pane.charts.sizes.zoom !== null")
    loss, cpu = before = browser.evaluate(shown_part)
    assert loss == cpu
    train(bench, 8)
    browser.wait_for("document.querySelector('.title').innerText.includes('window 8')")
    assert browser.evaluate(shown_part) == before
    browser.evaluate("document.querySelector('.panel .body[role=img]').focus()")
    browser.press("Escape")
    browser.wait_for(
        "window.page.pane.charts.loss.plot.scales.x.max === Math.max(...window.page.pane.charts.loss.plot.data[0])"
    )


def test_everything_that_can_be_used_is_reached_with_the_tab_key_and_seen_to_be(bench: Bench, browser: Browser) -> None:
    bench.publish(examples.job())
    train(bench, 0, 1)
    shown(browser, bench.server.url, f"{DRAWN} === 9")
    browser.wait_for("document.querySelectorAll('#job-list a').length === 1")
    wanted = browser.evaluate(
        "[...document.querySelectorAll('a, button, input, [tabindex=\"0\"]')].filter(one => one.offsetParent).length"
    )
    reached = []
    for _ in range(wanted):
        browser.press("Tab")
        reached.append(
            browser.evaluate(
                "(() => {const one = document.activeElement; one.dataset.reached = 1;"
                " return [one.tagName, getComputedStyle(one).outlineStyle]})()"
            )
        )
    assert {outline for _, outline in reached} == {"solid"}
    assert browser.evaluate("document.querySelectorAll('[data-reached]').length") == wanted > 25
