"""Upper bounds by memory: of artificial devices, and of a real one where there is one (`make gpu`)."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, distribute, offer, train_step
from torch import nn

from dynamix.schemas.messages import Job, Message
from dynamix.trainer.measurement import memory
from dynamix.trainer.measurement.memory import Memory, largest_sizes


@given(st.lists(st.integers(1, 1000), min_size=5, max_size=5), st.integers(2000, 10**6))
def test_what_is_found_fits(numbers: list[int], limit: int) -> None:
    static, floor, fixed, slope, begun = numbers
    peak = static + max(floor, fixed + slope * begun)
    (size,) = largest_sizes([Memory("a", static, peak, 0, limit, begun)], [begun], [10**9])
    assert size == begun or static + max(floor, fixed + slope * size) <= limit


def test_ranks_share_what_is_free_and_keep_what_they_began_with() -> None:
    found = [Memory(device, 100, 180, 100, 900, 8) for device in "aab"]
    assert largest_sizes(found, [8, 60, 8], [1000, 1000, 70]) == (39, 60, 70)
    with pytest.raises(ValueError, match="this model is on cpu: pass a number"):
        memory.read(torch.device("cpu"))


def _search(rank: int, caps: Path) -> dict[str, Any]:
    """Rank 0 is slower, and has twice the memory. Rank 1 runs out of it at the end; both resume before that."""
    now, published = {"allocated": 1000, "peak": 1000, "limit": (7800, 3900)[rank]}, list[Message]()

    def read(_device: torch.device, *, resets: bool = False) -> Memory:
        found = Memory(str(rank), now["allocated"], now["peak"], 0, now["limit"])
        now["peak"] = now["allocated"] if resets else now["peak"]
        return found

    def train(until: int, state: dict[str, Any] | None = None) -> tuple[Any, ...]:
        session, model, optimizer = begin_job(
            Numbered(4000, torch.float32), local_batch_size=16, policy=None, global_batch="fixed", window_steps=4,
            memory_caps_path=caps, min_local_batch_size=1, max_local_batch_size="auto",
        )  # fmt: skip
        session._transport.publish = published.append  # type: ignore[method-assign]
        optimizer.register_step_post_hook(lambda *_: now.update(allocated=1500))
        session.load_state_dict(state or session.state_dict())
        sizes = []
        for batch in session.loader:
            now["peak"] = max(now["peak"], now["allocated"] + 100 * session.num_samples)
            train_step(session, model, optimizer, batch, lambda _, samples: time.sleep(samples * (4e-4, 1e-4)[rank]))
            sizes.append(session.local_batch_sizes)
            offer(session, (4, 28))
            if session.step_index == until:
                break
        return session, sizes, session._run.identity.max_local_batch_sizes

    memory.read = read
    session, sizes, found = train(40)
    state, offers, error = session.state_dict(), session._steering.offers, torch.OutOfMemoryError if rank else KeyError
    with pytest.raises(error), session:
        raise error
    now["limit"] = 0  # nobody looks again
    session, resumed, lowered = train(50, state)
    session.close()
    first = published and isinstance(published[0], Job) and published[0].max_local_batch_sizes
    refused = offers and offers.num_refused["bounds"]
    return {"bounds": (found, lowered), "sizes": sizes, "resumed": resumed, "first": first, "refused": refused}


def test_ranks_agree_on_what_the_memory_of_each_holds(tmp_path: Path) -> None:
    results = run_ranks(_search, 2, tmp_path / "caps")
    for result in results:
        last = result["sizes"][-1]  # by measured times, within the bound
        assert (result["sizes"][:3], sum(last)) == ([(16, 16)] * 3, 32)
        assert 16 < last[1] <= 20
        bound = int(0.8 * last[1])
        assert result["bounds"] == ((55, 20), (55, bound))
        assert all(sum(sizes) == 32 and sizes[1] <= bound for sizes in result["resumed"])
    assert results[0]["first"] == (55, 20)
    assert results[0]["refused"] > 0


def _fill(_rank: int) -> int:
    torch.cuda.set_per_process_memory_fraction(2**30 / torch.cuda.mem_get_info()[1])
    layers = nn.Sequential(nn.Linear(6, 65536), *[nn.Tanh() for _ in range(8)], nn.Linear(65536, 4))
    model = distribute(layers.cuda())
    session, model, optimizer = begin_job(Numbered(8000, torch.float32), model, max_local_batch_size="auto")
    for inputs, targets, indices in session.loader:
        train_step(session, model, optimizer, (inputs.cuda(), targets.cuda(), indices))
        offer(session, session._run.identity.max_local_batch_sizes)
    (found,) = session.local_batch_sizes
    session.close()
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.zeros(2 * found, 6, device="cuda")).sum().backward()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_holds_what_was_found_and_not_twice_as_much() -> None:
    assert run_ranks(_fill, 1)[0] > 100
